"""DVC's stages: `python -m pipelines.stages train`. Each stage reads settings, calls functions, writes its outputs."""
