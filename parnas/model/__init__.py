"""The network: layers, embedding and softmax, Transformer-XL, and the SuperNet made of stochastic blocks."""
