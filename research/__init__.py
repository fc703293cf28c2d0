"""The five papers: studies, tables and figures, claims as tests. In no wheel."""
