"""Triton kernels: one file per family, each public function with the contract of the one of the same name in `kernels`.

They take CUDA tensors, or CPU tensors where TRITON_INTERPRET=1 was set before triton was first imported. Importing this
package imports nothing; its files import triton.
"""
