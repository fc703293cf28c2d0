"""Numbers into tables, sentences, pictures and pages."""
