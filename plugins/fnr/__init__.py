"""FNR-FL: `algorithm` is the paper, `authors` their code, `pair` the FedML pair."""
