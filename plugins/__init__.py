"""Federated-learning methods as FedML trainer/aggregator pairs, and the engines that simulate
them."""
