"""Federated learning on non-IID data: plugins for FedML, reproduced with DVC and MLflow.

`plugins` and `pipelines` in this folder are links to the checkout's folders. They make the folders importable under one
name, which a wheel can take: `fedml_noniid.plugins` and `fedml_noniid.pipelines`.
"""

__version__ = "0.2.0"
