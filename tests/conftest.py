"""One thread: small tensors in many processes on two cores."""

import torch

torch.set_num_threads(1)
