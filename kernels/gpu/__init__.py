"""Triton kernels. A function that has the same name as a function in `kernels` has the same contract. The kernels
accept CUDA tensors, or CPU tensors if TRITON_INTERPRET=1 was set before triton was first imported. The modules of this
package import triton; the package itself does not.
"""
