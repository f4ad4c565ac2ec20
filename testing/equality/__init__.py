"""Promise 1 as a suite: the same requests down every path have to give what one process alone gives."""
