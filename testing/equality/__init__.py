"""Tests of promise 1: the same requests must give the same answers on every path as in one process alone."""
