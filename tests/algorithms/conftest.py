"""Small tensors: more than one thread only waits."""

import torch

torch.set_num_threads(1)
