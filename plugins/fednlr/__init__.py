"""FedNLR: `algorithm` is the method, `pair` its FedML pair."""
