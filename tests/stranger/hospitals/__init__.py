"""A stranger's study: his own data set, partition, network, method and metric."""
