"""Pictures of runs, drawn from the files of their folders; no torch, and matplotlib only once something is drawn."""
