"""Tests of promise 1: on every path, requests must give the same answers as in a single process that runs alone."""
