"""The recipes that every runtime has to agree on, with hyper-parameters that make each method's
part visible."""

from __future__ import annotations

from itertools import combinations

from fedml_noniid.plugins import registry

# Small where a method's server learns, and above all deterministic in float32: Adam makes whole
# steps of a gradient that is nothing but rounding (a bias before a batch norm). So FedDF's step is
# tiny here, and FNR-FL refines with SGD.
PARAMETERS: dict[str, dict[str, object]] = {
    "apfl": {"alpha": 0.3},
    "cfl": {"eps1": 9.0, "eps2": 0.0, "first": 1, "clusters": 3},
    "ccvr": {"samples": 20, "epochs": 2, "batch_size": 16, "server_lr": 0.05},
    "datasharing": {"share": 0.5},
    "ditto": {"lam": 0.3},
    # Silos draw noise of their own: see SIMULATED.
    "dpfedavg": {"clip": 0.2, "noise": 0.0},
    "dpsgd": {"clip": 0.3, "noise": 0.0},
    "fed3r": {"fine_tune": True},
    "fedadam": {"server_lr": 0.03, "tau": 0.05, "beta1": 0.5},
    "fedala": {"max_passes": 5, "num_pre_loss": 2, "threshold": 0.01},
    "fedbabu": {"weights": "uniform"},
    "fedbn": {},
    # Without a clock all models are those of the round.
    "fedasync": {"server_lr": 0.6},
    "fedbuff": {"server_lr": 0.8},
    "fedcm": {"alpha": 0.3},
    "feddc": {"alpha": 0.3},
    "feddecorr": {"beta": 0.3},
    "feddf": {"steps": 4, "batch_size": 6, "server_lr": 1e-5},
    "feddyn": {"alpha": 0.3},
    "fedexp": {"eps": 0.01},
    "fedftg": {"iterations": 2, "model_steps": 2, "batch_size": 8, "noise_dim": 3, "hidden": 6},
    "fedgen": {
        "hidden": 6,
        "noise_dim": 3,
        "steps": 3,
        "batch_size": 8,
        "gen_batch_size": 4,
        "generator_lr": 0.01,
        "beta": 0.2,
    },
    "fedlc": {"tau": 0.8},
    "fednova": {},
    "fedntd": {"beta": 2.0, "tau": 1.5},
    "fedper": {},
    "fedproto": {"lam": 0.5},
    "fedprox": {"mu": 0.1},
    "fedrep": {},
    "fedrod": {},
    "fedrs": {"alpha": 0.3},
    "fedsam": {"rho": 0.3},
    "finetune": {},
    "fsl": {"epochs": 2, "batch_size": 8},
    "ifca": {"clusters": 3},
    "linear_probe": {},
    "moon": {"mu": 0.5},
    "oort": {},
    "powd": {},
    "qfedavg": {"q": 0.7},
    "rpowd": {},
    "scaffold": {},
    "sgdm": {"gamma": 0.5},
    # the papers
    "fnr": {"p": 0.7, "epochs": 2, "batch_size": 8},
    "fednnnn": {"beta": 0.8, "gamma": 0.5},
    "ccn": {"T": 0.4},
    "fednlr": {"mu0": 1.1},
    "rfedavg": {"lam": 0.01},
    "rfedavg_plus": {"lam": 0.01},
    # other readings of a method
    "fedadagrad": {"server_lr": 0.03, "tau": 0.05},
    "fedavgm": {"beta": 0.5},
    "fedlesam": {"rho": 0.3},
    "fednsam": {"gamma": 0.6, "rho": 0.3},
    "fedyogi": {"server_lr": 0.03, "tau": 0.05, "beta2": 0.9},
    "feddyn_authors": {"alpha": 0.3, "clip": 1.0},
    "scaffold_i": {"server_lr": 0.9},
    "sgdm_local": {"gamma": 0.5},
    "sgdm_server": {"gamma": 0.5},
    # compressed updates
    "ef21": {"share": 0.2},
    "ef_sign": {},
    "qsgd": {"bits": 3},
    "topk": {"share": 0.2},
    # against dishonest clients; of the three silos of a test, Krum can exclude none
    "bucketing": {},
    "centred_clipping": {"tau": 0.05, "beta": 0.6},
    "krum": {"f": 0},
    "median": {},
    "rfa": {},
    "trimmed_mean": {"beta": 0.34},
}
PAPERS = ("fnr", "fednnnn", "ccn", "fednlr", "rfedavg", "rfedavg_plus")
READINGS = (
    "fedadagrad",
    "fedavgm",
    "fedlesam",
    "fednsam",
    "feddyn_authors",
    "fedyogi",
    "scaffold_i",
    "sgdm_local",
    "sgdm_server",
)
PRIVATE = ("dpfedavg", "dpsgd")
CHOOSING = ("oort", "powd", "rpowd")
ROBUST = ("bucketing", "centred_clipping", "krum", "median", "rfa", "trimmed_mean")
COMPRESSED = ("ef21", "ef_sign", "qsgd", "topk")
APART = (*PAPERS, *READINGS, *PRIVATE, *CHOOSING, *ROBUST, *COMPRESSED)
BASES = tuple(m for m in PARAMETERS if m not in APART)

# Pairs of a base, or a paper, with a paper that are unsound, and the words that refuse them.
UNSOUND = {
    "fedadam+fednnnn": "server step",
    "feddyn+fednnnn": "server step",
    "feddc+fednnnn": "server step",
    "fedexp+fednnnn": "server step",
    "fedcm+fednlr": "neurons' learning rates",
    "rfedavg+rfedavg_plus": "feature distribution regulariser",
    "fedbn+fnr": "outside of local training",
    "fedper+fnr": "outside of local training",
    "fedrep+fnr": "outside of local training",
    **{f"{clusters}+fnr": "adds their updates to one" for clusters in ("cfl", "ifca")},
    **{f"{clusters}+fednnnn": "no client has it" for clusters in ("cfl", "ifca")},
    **{
        f"{clusters}+{paper}": "belongs to one model"
        for clusters in ("cfl", "ifca")
        for paper in ("rfedavg", "rfedavg_plus")
    },
    **{
        f"{stale}+{paper}": "in place of w_t"
        for stale in ("fedasync", "fedbuff")
        for paper in ("fnr", "rfedavg", "rfedavg_plus")
    },
    **{f"fedproto+{paper}": "averages no model" for paper in PAPERS},
}
PAIRS = tuple(
    pair
    for pair in (
        *(f"{base}+{paper}" for base in BASES for paper in PAPERS),
        *map("+".join, combinations(PAPERS, 2)),
    )
    if pair not in UNSOUND
)
# What the papers report: FNR-FL's table 5, CCN's tables I to III, FedNLR's section 7.
REPORTED = (
    "fnr",
    "fedprox+fnr",
    "scaffold+fnr",
    "moon+fnr",
    "fednova+fnr",
    "ccn",
    "fedprox+ccn",
    "scaffold+ccn",
    "sgdm+ccn",
    "fednova+ccn",
    "fedbabu+ccn",
    "feddyn+fednlr",
    "fedrs+fednlr",
    "fedlc+fednlr",
    "fednova+fednlr",
)
MORE = (
    "scaffold+fnr+rfedavg_plus+ccn",
    "fedbabu+fedrs+scaffold+fnr",
    "datasharing+moon+ccn+fednlr",
    "fedcm+fedsam",
    "fedsam+moon",
    "fedbn+fedsam",
    "fedlesam+scaffold",
    "fedbn+fedper",
    "ditto+scaffold",
    "fedala+moon",
    "fedbn+fedrep+fedprox",
    "apfl+fedprox+fedbabu",
    "finetune+sgdm",
    "fed3r+linear_probe",
    "fedprox+ifca",
    "cfl+fedbn+moon",
    "dpsgd+scaffold+moon",
    "dpsgd+dpfedavg+fedadam",
    "dpsgd+fnr",
    "bucketing+median",
    "fedavgm+trimmed_mean",
    "fednnnn+median",
    "krum+scaffold",
    "scaffold+topk",
    "fedadam+qsgd",
    "ef_sign+fedbn+fedprox",
    "ef21+rfedavg_plus",
    "dpsgd+topk",
    "powd+scaffold",
    "fednova+rpowd",
    "fnr+oort",
    "powd+rfedavg_plus+fedbn",
)


def _with(recipe: str, **options: object) -> tuple[str, dict[str, dict[str, object]]]:
    """One method with some of its hyper-parameters changed."""
    return recipe, {recipe: PARAMETERS.get(recipe, {}) | options}


# Options of single methods that go another way through the code.
VARIANTS: list[tuple[str, dict[str, dict[str, object]]]] = [
    _with("apfl", adaptive=True),
    _with("fedala", layers=0, start_rounds=9),
    _with("fed3r", fine_tune=False),
    _with("fed3r", penalise_bias=False, normalise=False, temperature=1.0),
    _with("fedproto", weights="uniform"),
    _with("fedrs", form="soft"),
    _with("fedlc", absent="floor"),
    _with("fednnnn", variant="momentum"),
    _with("fednlr", since=2),
    _with("krum", m=2),
    _with("rfa", weights="uniform"),
    _with("fednova", mu=0.2),
    _with("fednova", nu="weights"),
    _with("feddyn_authors", alpha_adapt="off", clip=0.5),
    _with("scaffold", weights="size", server_lr=0.9),
    _with("fedcm", server_lr=0.9),
    _with("fedexp", weights="size", evaluate="sent"),
]

# Options that only a simulation may have.
SIMULATED: list[tuple[str, dict[str, dict[str, object]]]] = [
    _with("rfedavg", dp="paper", clip=1.0, sigma=0.5, L=3),
    _with("rfedavg_plus", dp="paper", clip=1.0, sigma=0.5, L=3),
    _with("dpsgd", noise=0.7),
    _with("dpfedavg", noise=0.7),
]


def settings(recipe: str) -> dict[str, dict[str, object]]:
    """The table's hyper-parameters for the methods of a recipe."""
    return {method: PARAMETERS[method] for method in recipe.split("+") if PARAMETERS.get(method)}


SINGLES = [(recipe, settings(recipe)) for recipe in ("fedavg", *PARAMETERS)]
COMPOSITIONS = [(recipe, settings(recipe)) for recipe in (*PAIRS, *MORE)]


def label(recipe: str, methods: dict[str, dict[str, object]]) -> str:
    """A test's name: the recipe, and what it changes of the table's hyper-parameters."""
    changed = {
        key: value
        for method, values in methods.items()
        for key, value in values.items()
        if PARAMETERS.get(method, {}).get(key) != value
    }
    return recipe + "".join(f",{key}={value}" for key, value in changed.items())


ALONE = {label(*entry): entry for entry in (*SINGLES, *VARIANTS)}  # a method by itself
COMPOSED = {label(*entry): entry for entry in COMPOSITIONS}
EVERY = ALONE | COMPOSED | {label(*entry): entry for entry in SIMULATED}
STALE = {name for name, kind in registry.METHODS.items() if kind().needs.stale}
# A deployment waits for all, so it has no answers of models of earlier rounds. Those of the walks
# have all silos in each round, so there is none to choose.
DEPLOYED = {
    name: entry
    for name, entry in (ALONE | COMPOSED).items()
    if {*STALE, *CHOOSING}.isdisjoint(entry[0].split("+"))
}
DEPLOYED_ALONE = {name: entry for name, entry in DEPLOYED.items() if name in ALONE}
