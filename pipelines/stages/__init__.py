"""DVC's stages: `python -m pipelines.stages train`. Each reads settings, calls, writes its outputs."""
