"""What a study binds: who signed it, until when, and every message of its run."""

from __future__ import annotations

import datetime
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from fedml_noniid.core.data import Samples
from fedml_noniid.core.errors import UserError
from fedml_noniid.core.sums import SOURCE
from fedml_noniid.deploy import settings, wire
from fedml_noniid.deploy.server_run import ServerRun
from fedml_noniid.governance import study
from fedml_noniid.governance.secure import silo as secure
from tests.deploy import world
from tests.governance.conftest import TODAY, Place
from tests.recipe_table import DEPLOYED


def test_a_study_holds_until_its_last_day(place: Place) -> None:
    agreed = place.decide(TODAY + datetime.timedelta(days=30))
    assert agreed.signed.owner == place.owner
    with pytest.raises(UserError, match=r"'of three hospitals' expired on 2027-03-31"):
        place.decide(TODAY + datetime.timedelta(days=31))


def of_another_owner(place: Place) -> None:
    other = place.key.with_name("other.key")
    study.make_key(other)
    study.sign(place.study, other)


def of_other_silos(place: Place) -> None:
    content = study.yaml.safe_load(place.study.read_text()) | {"silos": ["silo-1"]}
    place.study.write_text(study.yaml.safe_dump(content))
    study.sign(place.study, place.key)


def of_another_study(place: Place) -> None:
    signature = study.signature_of(place.study).read_text()
    place.make("fedavg")
    study.signature_of(place.study).write_text(signature)


def decided(place: Place, change: Callable[[Place], object]) -> None:
    change(place)
    place.decide()


REFUSED: list[tuple[Callable[[Place], object], str]] = [
    (lambda place: appended(place.study), r"study\.yaml: was changed after it was signed"),
    (of_another_owner, r"study\.yaml: is signed by .*; allowed: the owners of the policy"),
    (of_another_study, "was changed after it was signed"),
    (of_other_silos, r"silos = \['silo-1'\] is refused"),
    (lambda place: study.signature_of(place.study).unlink(), r"study\.yaml\.sig: can't be read"),
    (lambda place: appended(study.signature_of(place.study)), r"yaml\.sig: is no signature"),
    (lambda place: place.policy.unlink(), r"policy\.yaml: there is no such file; who has no"),
]


def appended(path: Path) -> None:
    path.write_text(path.read_text() + "\n{")


@pytest.mark.parametrize(("change", "words"), REFUSED)
def test_what_the_owner_has_not_signed_is_refused(
    place: Place, change: Callable[[Place], None], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        decided(place, change)


def test_a_site_can_not_change_what_was_signed(place: Place) -> None:
    """Its own file may leave keys of the study out. A value of its own is named."""
    content = study.yaml.safe_load(place.config.read_text())
    content["train_args"] = {"rounds": 2}
    del content["model_args"]
    place.config.write_text(study.yaml.safe_dump(content))
    assert place.decide().deployment.train_args.recipe == "scaffold"
    content["train_args"] = {"rounds": 7, "learning_rate": 0.2}
    place.config.write_text(study.yaml.safe_dump(content))
    with pytest.raises(UserError) as error:
        place.decide()
    rate, rounds = str(error.value).splitlines()
    said = "train_args.learning_rate = 0.2 is not what the study says; allowed: 0.1, or no such key"
    assert rate == f"{place.config}: {said}" and "train_args.rounds = 7 is not" in rounds


def test_other_code_than_the_signed_one_is_refused(place: Place) -> None:
    agreed = place.decide()
    terms = world.terms("scaffold", {}, batch_norm=True)
    agreed.signed.study.check_terms(terms)
    other = agreed.signed.study.model_copy(update={"code": {"fedml_noniid": "0", "fedx": "1"}})
    with pytest.raises(UserError, match="the code of 'fedml_noniid', 'fedx' is not what was"):
        other.check_terms(terms)
    with pytest.raises(UserError, match="public samples, or the model's fixed parameters"):
        agreed.signed.study.check_terms(world.terms("fedavg", {}, batch_norm=True))


@pytest.mark.parametrize("recipe", ["fnr", "datasharing", "scaffold"])
def test_public_samples_are_those_with_which_the_study_was_made(recipe: str) -> None:
    """Their number, images and labels; only if the recipe reads them."""
    made, (server, silo, *_) = world.deployment(recipe), world.shards_of()
    x, y, *_ = silo.parts["public"]
    signed = study.make(made, server, "of public images", TODAY)
    network = made.network(tuple(x.shape[1:]), silo.n_classes, None)
    signed.check_terms(settings.terms(made, recipe, network, silo.parts["public"]))
    for other in (Samples(x[1:], y[1:]), Samples(x * 2 - 1, y), Samples(x, y.flip(0))):
        terms = settings.terms(made, recipe, network, other)
        words = "public samples, or the model's fixed parameters, are not those"
        with pytest.raises(UserError, match=words) if recipe != "scaffold" else nullcontext():
            signed.check_terms(terms)


def asked(recipe: str) -> Iterator[tuple[study.Study, int, int, str, wire.Table]]:
    """A study, and every message of its run with a silo that misses round 2."""
    terms = world.terms(*DEPLOYED[recipe], batch_norm=True, rounds=3)
    asks = terms.algorithm.exchanges
    made = study.Study.model_construct(
        messages=study.messages(terms, world.shards_of()[0]),
        asks=study.Asks(begin=asks.begin, round=asks.round, finish=asks.finish, tests=terms.tests),
        train_args=terms.plan.local.model_copy(update={"rounds": 3}),
    )
    server, silos = ServerRun(terms, world.shards_of()[0]), world.silos_of(terms)
    while (down := server.down).ask is not None:
        ups, name = {}, wire.name(down.ask)
        for k in down.ask.to:
            mine = wire.row_of(down, k)
            yield made, down.exchange, down.round, name, wire.table_of(wire.tensors(mine))
            ups[k] = wire.up(k, down.exchange, silos[k].answer(mine))
            assert study.forms(ups[k]["leaves"]) == made.messages[name].up
        if down.round == 2 and len(ups) > 1:
            server.without([ups.popitem()[0]])
        server.feed(server.open(ups))


def changed(table: wire.Table, **values: object) -> wire.Table:
    """The table with other values of the entry of a model's first layer."""
    key = "params/hidden.weight" if "params/hidden.weight" in table else next(iter(table))
    return table | {key: table[key].model_copy(update=values)}


LIES: list[tuple[str, Callable[[int, int, str, wire.Table], tuple]]] = [
    ("float32 .4096", lambda e, r, j, t: (e, r, j, changed(t, shape=(4096, 16)))),
    ("is float64", lambda e, r, j, t: (e, r, j, changed(t, dtype="float64"))),
    ("no tensor", lambda e, r, j, t: (e, r, j, dict(list(t.items())[1:]))),
    (
        "study says no tensor",
        lambda e, r, j, t: (e, r, j, t | {"/".join("a" * 900): next(iter(t.values()))}),
    ),
    ("has none like it", lambda e, r, j, t: (-7, r, j, t)),
    ("has none like it", lambda e, r, j, t: (10**9, r, j, t)),
    ("has none like it", lambda e, r, j, t: (e, r + 1, j, t)),
    ("has none like it", lambda e, r, j, t: (e, -1, j, t)),
    ("job 'other.train'; the study has only train", lambda e, r, j, t: (e, r, "other.train", t)),
    ("job ''", lambda e, r, j, t: (e, r, "", t)),
]


@pytest.mark.parametrize(("words", "lie"), LIES)
def test_a_server_asks_nothing_that_was_not_signed(words: str, lie: Callable) -> None:
    made, *message = next(asked("scaffold"))
    made.refuse_message(*message)
    with pytest.raises(wire.RefusedError, match=words) as error:
        made.refuse_message(*lie(*message))
    assert error.value.name == "study" and "\n" not in str(error.value)


def test_a_job_of_the_study_may_come_in_another_exchange() -> None:
    """A limit, which docs/threats.md states: CCVR's statistics before the first training."""
    (made, exchange, round_, job, _), *_, (*_, other, table) = asked("ccvr")
    assert job != other
    made.refuse_message(exchange, round_, other, table)


def test_a_sum_is_over_silos_of_the_study_and_over_what_it_sends(place: Place) -> None:
    """Over two or three of three silos; never in a study without secure sums."""
    plain = place.decide().signed.study
    place.make("scaffold", secure_sums=2)
    made = place.decide().signed.study
    train = made.messages["train"]
    assert {key.partition("/")[0] for key in train.up} == {"n", "steps", "loss", "secure"}

    def table(silos: int, tensors: int) -> wire.Table:
        asked = secure.requested(silos, tensors)
        return wire.table_of({f"shared/{key}": leaf for key, leaf in asked.items()})

    tensors = len(train.added)
    for silos in (2, 3):
        made.refuse_message(0, 1, secure.SUM, table(silos, tensors))
    more = {"more": next(iter(table(1, 1).values()))}
    for wrong in (table(4, tensors), table(3, tensors + 1), table(3, 10**6), more):
        with pytest.raises(wire.RefusedError, match="the study says"):
            made.refuse_message(0, 1, secure.SUM, wrong)
    with pytest.raises(wire.RefusedError, match="job 'sum'; the study has only train"):
        plain.refuse_message(0, 1, secure.SUM, table(3, tensors))


@pytest.mark.slow  # imports FedML in a process of its own
def test_the_hash_of_our_source_covers_what_a_deployment_runs() -> None:
    """Also behind links, as a checkout has them, and C++."""
    code = (
        "from fedml_noniid.processes import loopback; from fedml_noniid.deploy import pair, "
        "silo_client, silo_server; from fedml_noniid.governance.secure import silo; import sys; "
        "print(*(module.__file__ for name, module in sys.modules.items() "
        "if name.split('.')[0] == 'fedml_noniid'))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    covered = {file.resolve() for file in study.files_of_ours()}
    loaded = {Path(file).resolve() for file in run.stdout.split()}
    assert len(loaded) > 100 and loaded <= covered
    assert SOURCE.resolve() in covered
    assert not [file for file in covered if "pipelines" in file.parts]
