"""Studies that train many networks: pipeline, baselines, stability, black-box search, tuning of settings."""
