"""DVC's stages: `python -m fedml_noniid.pipelines.stages train`.

A stage reads settings, calls, writes outputs.
"""
