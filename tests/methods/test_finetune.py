"""The control of fine-tuning: each client is tested with its model after local training."""

from __future__ import annotations

import torch

from tests.methods import by_hand as hand


def test_own_models_are_those_of_the_last_local_training(engine: str) -> None:
    """Two of three clients a round: one that missed the last round has an older model; one that
    never took part has the global one."""
    ran = hand.run("finetune", engine=engine, cohort=1, rounds=2)
    plain = hand.run("fedavg", engine=engine, cohort=1, rounds=2)
    assert hand.identical(ran, plain)
    cohorts = [cohort[0] for _, cohort, _ in ran.rounds()]
    own = ran.outcome.personal["params"]
    for k in range(3):
        if k in cohorts:
            last = max(t for t, client in enumerate(cohorts) if client == k)
            wanted = ran.local(last)[0]
        else:
            wanted = hand.arrays(ran.outcome.params)
        hand.same(hand.row(own, k), wanted)
    assert len(set(cohorts)) < 3, "one never took part"
    assert not torch.equal(own["fc1.weight"][cohorts[0]], ran.outcome.params["fc1.weight"]) or (
        cohorts[0] == cohorts[1]
    )
