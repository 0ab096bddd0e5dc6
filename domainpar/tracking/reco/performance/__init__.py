"""The quality of tracks: matched to the true particles, counted in integers, summed over events and divided once."""
