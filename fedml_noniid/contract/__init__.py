"""The contract's tests, for methods of any package:

    pytest --pyargs fedml_noniid.contract --method my_package:FedX --neutral mu=0

`checks` and `silos` have the checks, `suite` names them, `plugin` is the part of pytest. The walks
of this repository's tests over its own methods call the same checks.
"""
