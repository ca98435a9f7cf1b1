"""Put this folder on PYTHONPATH and `import sgl_kernel` finds the stand-in beside this file. Used only where no CUDA is."""
