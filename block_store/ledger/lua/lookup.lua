-- lookup(hashes by group): answers with the length in blocks of the longest prefix indexed for every group. Reads only,
-- takes no references.
local longest = indexed_prefix(ARGV[2])
return '+' .. text(longest)
