"""rFedAvg and rFedAvg+: `algorithm` has both, `authors` their code, `pair` the FedML pairs."""
