"""The tables and figures of the papers, each built from the results of studies: `pipelines/<paper>/targets.yaml`."""
