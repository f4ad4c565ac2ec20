"""Triton kernels. A function with the same name as a function in `kernels` has the same contract, except where its
docstring says otherwise. The kernels accept CUDA tensors, or CPU tensors if TRITON_INTERPRET=1 was set before triton
was first imported. The modules of this package import triton; the package itself does not.
"""
