"""Readers of a data set's own files, one kind of file each: functions (root, **options) -> Raw."""
