"""The plan command: what a run will do on a cluster, read from its compiled train step."""
