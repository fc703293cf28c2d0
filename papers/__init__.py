"""The pictures of the five papers, drawn from runs; `noniid papers` calls their functions."""
