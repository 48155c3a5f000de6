"""The one training loop and what it stands on: device, schedules, checkpoints, perplexity, latency."""
