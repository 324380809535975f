"""Models: small built-in ones, and any `nn.Module` by `package.module:factory`."""
