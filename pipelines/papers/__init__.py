"""The five papers: studies, and the tables and figures that are made from them."""
