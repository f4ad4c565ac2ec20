"""Triton kernels: one file per family. Every public function has the contract of its namesake in `kernels`.

They accept CUDA tensors, or CPU tensors if TRITON_INTERPRET=1 was set before triton was first imported. Importing this
package imports nothing; its modules import triton.
"""
