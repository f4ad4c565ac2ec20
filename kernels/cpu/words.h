// The representation of queries, keys and values for the two products of attention: 32-bit words, each of which holds
// one fp32 element or a pair of bf16 elements. Keys of 8 bits become words of the query's dtype.
#pragma once

#include "integers.h"

namespace ll {

// The dot product of a query and a key. Each word of the key needs TERMS multiply-adds, each with one float of the
// query. They form one chain over head_dim, in ascending order.
template <class T>
struct Dot {
    static constexpr int PER_WORD = 1, TERMS = 1;  // elements and multiply-adds per word
    static LL_INLINE void pack_q(float* dst, const T* q, int d) {
        for (int i = 0; i < d; i += W) store_upto(dst + i, load_upto(q + i, d - i), d - i);
    }
    template <int TERM>
    static LL_INLINE vf term(vf word) { return word; }
    static LL_INLINE vf madd(vf k, float q, vf acc) { return fma(k, splat(q), acc); }
};

template <>
struct Dot<bf16> {
    static constexpr int PER_WORD = 2;
#if defined(LL_AVX512)  // vdpbf16ps: both elements of a pair at once
    static constexpr int TERMS = 1;
    static LL_INLINE void pack_q(float* dst, const bf16* q, int d) { std::memcpy(dst, q, d * sizeof(bf16)); }
    template <int TERM>
    static LL_INLINE vf term(vf word) { return word; }
    static LL_INLINE vf madd(vf k, float q, vf acc) {
        return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)(__m512)k, (__m512bh)_mm512_set1_ps(q));
    }
#else  // the elements of a pair are widened in registers, one after the other
    static constexpr int TERMS = 2;
    static LL_INLINE void pack_q(float* dst, const bf16* q, int d) {
        for (int i = 0; i < d; i += W) store_upto(dst + i, load_upto(q + i, d - i), d - i);
    }
    template <int TERM>
    static LL_INLINE vf term(vf word) { return TERM == 0 ? lower_half(word) : upper_half(word); }
    static LL_INLINE vf madd(vf k, float q, vf acc) { return fma(k, splat(q), acc); }
#endif
};

// The dot product of queries of type T with keys of type E.
#if defined(LL_INTEGERS)
template <class T, class E>
using DotOf = std::conditional_t<IN_INTEGERS<T, E>, IntegerDot, Dot<T>>;
#else
template <class T, class E>
using DotOf = Dot<T>;
#endif

// The words of a key of 8 bits, without its scale. A block of 2 n elements becomes n pairs of bf16, (i, n + i), without
// a shuffle. `pack_q` puts a query into the same order.
template <class T>
struct Words {
    template <class E>
    static LL_INLINE vf of(const E* key, int n) { return load_upto(key, n); }
    static LL_INLINE void pack_q(float* dst, const T* q, int d) { Dot<T>::pack_q(dst, q, d); }
};

template <>
struct Words<bf16> {
    template <class E>
    static LL_INLINE vf of(const E* key, int n) {
        return (vf)((vu)load_upto(key, n) >> 16 | (vu)load_upto(key + n, n));
    }
    static LL_INLINE void pack_q(float* dst, const bf16* q, int d) {
        constexpr int BLOCK = 2 * W, FLOATS = BLOCK / 2 * Dot<bf16>::TERMS;
        for (int i = 0; i < d; i += BLOCK, dst += FLOATS) {
            const int n = (d - i < BLOCK ? d - i : BLOCK) / 2;
            bf16 pairs[BLOCK];
            for (int j = 0; j < n; ++j) pairs[2 * j] = q[i + j], pairs[2 * j + 1] = q[i + n + j];
            Dot<bf16>::pack_q(dst, pairs, 2 * n);
        }
    }
};

// Loads columns of a row of values as floats. 2 W columns of bf16 are widened at once: the W even ones, then the W odd
// ones. The sums are stored in this order, which does not change any sum, and `in_order` restores the order of columns.
// Columns after the last whole group of 2 W are not reordered.
template <class T>
struct Columns {
    template <int C>
    static LL_INLINE void load_block(const T* p, vf (&v)[C]) {
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) v[c] = load(p + c * W);
    }
    static LL_INLINE void in_order(vf&, vf&) {}
};

template <>
struct Columns<bf16> {
    template <int C>
    static LL_INLINE void load_block(const bf16* p, vf (&v)[C]) {
        static_assert(C % 2 == 0);
#pragma GCC unroll 4
        for (int c = 0; c < C; c += 2) {
            vf words = load_as<vf>(p + c * W);
            v[c] = lower_half(words), v[c + 1] = upper_half(words);
        }
    }
    static LL_INLINE void in_order(vf& even, vf& odd) {
        vf low = zip_low(even, odd);
        odd = zip_high(even, odd), even = low;
    }
};

}  // namespace ll
