"""Triton kernels. Every public function has the contract of the function with the same name in `kernels`. They accept
CUDA tensors, or CPU tensors if TRITON_INTERPRET=1 was set before triton was first imported. The modules of this package
import triton; the package itself does not.
"""
