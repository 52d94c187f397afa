"""Multi-head latent attention (DSA models) over hot buffers."""
