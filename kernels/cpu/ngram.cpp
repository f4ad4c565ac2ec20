// The look-up of n-grams in a sequence's tokens. Contract: kernels/ngram.py.
#include "entries.h"

LL_EXPORT int ll_latest_ngram(const int32_t* tokens, int64_t num, int64_t longest, int64_t shortest) {
    int64_t best = 0, most = shortest - 1;
    const int32_t* last = tokens + num - 1;
    for (int64_t at = num - 1; at > most; --at) {
        const int32_t* same = tokens + at - 1;
        if (*same != *last) continue;
        int64_t length = 1, bound = longest < at ? longest : at;
        while (length < bound && same[-length] == last[-length]) ++length;
        if (length > most) {
            best = at, most = length;
            if (most == longest) break;
        }
    }
    return int(best);
}
