"""Inference: one supervised child process per GPU. torch and diffusers are imported only inside that process."""
