"""The tables and figures of the papers, built from studies as
`pipelines/papers/<paper>/targets.yaml` says."""
