"""Built-in models, models of other packages, pretrained weights, and saved models.

A model is a plain `nn.Module`. Its state during training is in `training`.
"""
