// Products, norms and choices of a decoder's forward on a CPU: a row has the same bits in every company.
//
// Each number is summed by one thread in one order, which depends on neither the number of rows, nor
// on the tree around a node, nor on the threads. So a node of a tree gives the bits of a forward over
// one token. `build.py` compiles these files at their first use, and `ops.py` says what they take.

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "team.c"
#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AVX512VNNI__)
#define AMX  // the matrix unit (amx.c)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#ifdef __AVX512F__  // L: floats of a vector; outputs of a block, keys of a tile
#define L 16
#elif defined(__AVX__)
#define L 8
#else
#define L 4
#endif
typedef float F __attribute__((vector_size(4 * L), aligned(4), may_alias));
typedef int32_t I __attribute__((vector_size(4 * L), aligned(4), may_alias));
typedef uint16_t H __attribute__((vector_size(2 * L), aligned(2), may_alias));
typedef uint32_t U __attribute__((vector_size(4 * L), aligned(4), may_alias));
#define INLINE static inline __attribute__((always_inline))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) < (b) ? (b) : (a))

enum { DONE, NO_MEMORY };  // what a kernel returns; without memory, what it wrote is of no use

// Room for `bytes`, from the beginning of a line of the cache on; NULL if there is none.
static void *take_room(int64_t bytes) { return aligned_alloc(64, (bytes + 63) / 64 * 64); }

// Unrolls the whole loop that follows, so that an array of sums stays in registers; clang reads only its own words.
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

INLINE F add(F a, F b, F c) {  // a * b + c, rounded once; a compiler that chooses itself would choose by loop
#if defined(__AVX512F__)
  return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (F)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON)
  return (F)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

INLINE F all(float x) { return x - (F){}; }

INLINE float wide(uint16_t x) { union { uint32_t u; float f; } v = {(uint32_t)x << 16}; return v.f; }

INLINE uint16_t narrow(float x) {  // to the nearest, ties to even; NaN stays NaN
  union { float f; uint32_t u; } v = {x};
  if (x != x) return 0x7fc0;
  return (v.u + 0x7fff + (v.u >> 16 & 1)) >> 16;
}

INLINE float get(const void *x, int64_t i, int half) {
  return half ? wide(((const uint16_t *)x)[i]) : ((const float *)x)[i];
}

INLINE void put(void *y, int64_t i, float value, int half) {
  if (half) ((uint16_t *)y)[i] = narrow(value); else ((float *)y)[i] = value;
}

// L numbers of 16 bits as 32; some compilers split the widest vectors.
INLINE U widened(H x) {
#if defined(__AVX512F__)
  return (U)_mm512_cvtepu16_epi32((__m256i)x);
#elif defined(__AVX2__)
  return (U)_mm256_cvtepu16_epi32((__m128i)x);
#else
  return __builtin_convertvector(x, U);
#endif
}

INLINE F from_halves(H x) {  // L numbers in half precision
#if defined(__AVX512F__)
  return (F)_mm512_cvtph_ps((__m256i)x);
#elif defined(__F16C__)
  return (F)_mm256_cvtph_ps((__m128i)x);
#elif defined(__aarch64__)
  return (F)vcvt_f32_f16((float16x4_t)x);
#else  // 2^112 moves the exponent to that of single precision; what is 2^16 then was infinite, or NaN
  U bits = widened(x);
  F size = (F)((bits & 0x7fffu) << 13) * 0x1p112f;
  U infinite = (U)(size >= 0x1p16f) & 0x7f800000u;
  return (F)((U)size | infinite | (bits & 0x8000u) << 16);
#endif
}

INLINE int any(I x) {  // of numbers that are 0 or -1
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)x, (__m512i)x) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_ps((__m256)x) != 0;
#else
  int found = 0;
  for (int c = 0; c < L; c++) found |= x[c];
  return found != 0;
#endif
}

INLINE F load(const void *x, int64_t i, int half) {  // L neighbours as floats
  if (!half) return *(const F *)((const float *)x + i);
  return (F)(widened(*(const H *)((const uint16_t *)x + i)) << 16);
}

INLINE void store(void *y, int64_t i, F value, int half) {  // rounds as `narrow`
  if (!half) { *(F *)((float *)y + i) = value; return; }
  U bits = (U)value, wrong = (U)(value != value);
  bits = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  bits = (bits & ~wrong) | (wrong & 0x7fc0u);
#if defined(__AVX512F__)
  *(H *)((uint16_t *)y + i) = (H)_mm512_cvtepi32_epi16((__m512i)bits);
#else
  *(H *)((uint16_t *)y + i) = __builtin_convertvector(bits, H);
#endif
}

INLINE F larger(F a, F b) {
  I first = a > b;
  return (F)(((I)a & first) | ((I)b & ~first));
}

INLINE F exponential(F x) {  // x <= 0 or NaN; error below 2 units in the last place (Cephes, expf)
  I hidden = x < -87.0f;
  x = (F)((I)x & ~hidden);
  F n = add(x, all(1.44269504088896341f), all(12583039.0f));  // rounds to a whole number, and adds 127
  F power = (F)((U)n << 23);  // 2^n
  n -= 12583039.0f;
  x = add(n, all(2.12194440e-4f), add(n, all(-0.693359375f), x));
  F y = add(all(1.9875691500e-4f), x, all(1.3981999507e-3f));
  y = add(y, x, all(8.3334519073e-3f));
  y = add(y, x, all(4.1665795894e-2f));
  y = add(y, x, all(1.6666665459e-1f));
  y = add(y, x, all(5.0000001201e-1f));
  y = add(y * x, x, x);
  return (F)((I)add(y, power, power) & ~hidden);  // (y + 1) 2^n
}

// --- Norm -----------------------------------------------------------------------------------------
// Vectors of sums that run side by side in a row: at least 8 sums, so that aarch64 has the bits of AVX2.
enum { SIDES = L < 8 ? 8 / L : 1 };

// Row r of y [n, width] = x / sqrt(mean of x^2 + eps), rounded, times the weight.
static void norm_row(const void *x, const void *weight, void *y, int64_t r, int64_t width, float eps, int half) {
  F squares[SIDES] = {};
  float rest = 0;
  int64_t i = 0, at = r * width;
  for (; i + SIDES * L <= width; i += SIDES * L)
    for (int s = 0; s < SIDES; s++) {
      F numbers = load(x, at + i + s * L, half);
      squares[s] = add(numbers, numbers, squares[s]);
    }
  for (; i < width; i++) rest += get(x, at + i, half) * get(x, at + i, half);
  for (int c = 0; c < SIDES * L; c++) rest += squares[c / L][c % L];
  float factor = 1 / sqrtf(rest / width + eps);
  for (i = 0; i + L <= width; i += L) {
    store(y, at + i, load(x, at + i, half) * factor, half);
    store(y, at + i, load(y, at + i, half) * load(weight, i, half), half);
  }
  for (; i < width; i++) {
    put(y, at + i, get(x, at + i, half) * factor, half);
    put(y, at + i, get(y, at + i, half) * get(weight, i, half), half);
  }
}

int rms_norm(const void *x, const void *weight, void *y, int64_t n, int64_t width, float eps, int half, int threads) {
#pragma omp parallel for num_threads(choose_threads(threads)) if (n * width > 1 << 14)
  for (int64_t r = 0; r < n; r++) norm_row(x, weight, y, r, width, eps, half);
  return DONE;
}

// --- Noise ----------------------------------------------------------------------------------------
// A whole number below 2^53 as a double. Compilers turn a cast into a loop over single numbers where the processor
// has no vectors of it: 2^84 and 2^52 hold the halves of the number in their last bits.
INLINE double widen(uint64_t whole) {
  uint64_t high = whole >> 32 | 0x4530000000000000, low = (whole & 0xffffffff) | 0x4330000000000000;
  double upper, lower;
  memcpy(&upper, &high, 8);
  memcpy(&lower, &low, 8);
  return upper - 0x1.00000001p84 + lower;
}

// The natural logarithm of a number in (2^-1000, 2) by the series of atanh, to 13 digits; below of a float, to 7.
INLINE double ln(double x) {
  uint64_t bits, exponent;
  memcpy(&bits, &x, 8);
  exponent = (bits - 0x3fe6a09e667f3bcd + (1024ULL << 52)) >> 52;  // 1024 more than it is, so never negative
  bits -= (exponent - 1024) << 52;  // what is left lies within sqrt(1/2) and sqrt(2)
  memcpy(&x, &bits, 8);
  double s = (x - 1) / (x + 1), z = s * s;
  double sum = 1. / 3 + z * (1. / 5 + z * (1. / 7 + z * (1. / 9 + z * (1. / 11 + z * (1. / 13 + z / 15)))));
  return (widen(exponent) - 1024) * 0.693147180559945309417 + 2 * s * (1 + z * sum);
}

INLINE float lnf(float x) {
  int32_t bits, exponent;
  memcpy(&bits, &x, 4);
  exponent = (bits - 0x3f3504f3) >> 23;
  bits -= exponent * (1 << 23);
  memcpy(&x, &bits, 4);
  float s = (x - 1) / (x + 1), z = s * s;
  return exponent * 0.693147181f + 2 * s * (1 + z * (1.f / 3 + z * (1.f / 5 + z * (1.f / 7 + z / 9))));
}

// Number `token` of the SplitMix64 stream from `start`: its upper 53 bits.
INLINE uint64_t draw_bits(uint64_t start, uint64_t token) {
  uint64_t z = start + (token + 1) * 0x9E3779B97F4A7C15ULL;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ULL;
  z = (z ^ z >> 27) * 0x94D049BB133111EBULL;
  z = (z ^ z >> 31) >> 11;
  return z - (z == 0x1fffffffffffff);  // the largest would round to 1
}

// The number of an exponential distribution, -ln u, of these bits of u. Its Gumbel number is -lnf of it.
INLINE float waiting_time(uint64_t bits) { return -ln((widen(bits) + .5) * 0x1p-53); }

// Rows of Gumbel numbers y [rows, size]: the SplitMix64 streams from `starts` (`treespec.sampling.noise`).
// tokens: [size] the tokens whose numbers they are, or NULL: 0, 1, 2, ...
int noise(const int64_t *starts, const int64_t *tokens, float *y, int64_t rows, int64_t size, int threads) {
  int64_t blocks = (size + 1023) / 1024;
#pragma omp parallel for num_threads(choose_threads(threads))
  for (int64_t block = 0; block < rows * blocks; block++) {
    int64_t first = block % blocks * 1024, many = MIN(1024, size - first);
    uint64_t start = starts[block / blocks];
    float *to = y + block / blocks * size + first;
    if (tokens) {
#pragma omp simd
      for (int64_t i = 0; i < many; i++) to[i] = waiting_time(draw_bits(start, tokens[first + i]));
    } else {
#pragma omp simd
      for (int64_t i = 0; i < many; i++) to[i] = waiting_time(draw_bits(start, first + i));
    }
#pragma omp simd
    for (int64_t i = 0; i < many; i++) to[i] = -lnf(to[i]);
  }
  return DONE;
}

// --- Products -----------------------------------------------------------------------------------
// A weight [out, in] lies in blocks of L outputs; `in` is padded to a multiple of 32, `out` of L. In
// bfloat16 a block holds pairs of inputs, [out/L, in/2, L, 2]; in other forms [out/L, in, L].

// The form of a weight: bfloat16, float16, float32; eight or four bits with scales (eight_bits.c).
enum { PAIRED, HALF, SINGLE, Q8_0, Q4_0, Q4_1 };

// Where input i of output o lies in a packed weight of padded width.
INLINE int64_t place_of(int64_t o, int64_t i, int64_t width, int form) {
  int64_t inside = form == PAIRED ? i / 2 * 2 * L + o % L * 2 + i % 2 : i * L + o % L;
  return o / L * L * width + inside;
}

int pack(const void *weight, void *packed, int64_t in, int64_t out, int form) {
  int64_t width = (in + 31) / 32 * 32;
#pragma omp parallel for
  for (int64_t o = 0; o < (out + L - 1) / L * L; o++)
    for (int64_t i = 0; i < width; i++) {
      int64_t to = place_of(o, i, width, form), from = o * in + i;
      int real = o < out && i < in;
      if (form == SINGLE) ((uint32_t *)packed)[to] = real ? ((const uint32_t *)weight)[from] : 0;
      else ((uint16_t *)packed)[to] = real ? ((const uint16_t *)weight)[from] : 0;
    }
  return DONE;
}

int unpack(const void *packed, void *weight, int64_t in, int64_t out, int form) {
  int64_t width = (in + 31) / 32 * 32;
#pragma omp parallel for
  for (int64_t o = 0; o < out; o++)
    for (int64_t i = 0; i < in; i++) {
      int64_t from = place_of(o, i, width, form), to = o * in + i;
      if (form == SINGLE) ((uint32_t *)weight)[to] = ((const uint32_t *)packed)[from];
      else ((uint16_t *)weight)[to] = ((const uint16_t *)packed)[from];
    }
  return DONE;
}

// The most rows of a tile, and the most blocks: of a tile of few rows, of a tile of all. The sums stay in registers.
#ifdef __AVX512F__
enum { ROWS = 8, FEW_ROWS = 6, BLOCKS = 4, BLOCKS_OF_MANY = 3 };
#else
enum { ROWS = 4, FEW_ROWS = 4, BLOCKS = 2, BLOCKS_OF_MANY = 2 };
#endif

// How rows and weights are read: `pairs` by the processor's own product of bfloat16, `rounded` to eight bits (by
// eight_bits.c), others in floats.
typedef enum { PAIRS, WIDE, HALVES, FLOATS, ROUNDED } Mode;

// What a loop over weights asks for ahead, in bytes, into the second level of caches: the processor's own guesses end
// with each page and each block. At the end of its blocks it asks for the beginnings of the next ones:
//
//   a tile of two blocks      | block 0 ........ | block 1 ........ |         | block 2 ...
//   reads                                 ^                  ^
//   asks for                                  ^                  ^            then ^
//
// A tile of further rows (`again`) finds its blocks in the cache, and asks for all of the next ones.
enum { AHEAD = 2048 };

// rows x blocks of outputs. x: [rows, width]; w: blocks of a weight, `block` bytes each.
INLINE void tile(const char *x, const char *w, F *sums, int64_t width, int rows, int blocks, Mode mode, int again) {
  F sum[ROWS][BLOCKS] = {};
  int64_t step = mode == PAIRS || mode == WIDE ? 2 : 1, size = mode == FLOATS ? 4 : 2;
  int64_t block = L * width * size, ahead = again ? blocks * block : AHEAD;
  for (int64_t i = 0; i < width; i += step, w += step * size * L) {
    if (!again && (width - i) * size * L <= AHEAD) ahead = AHEAD + (blocks - 1) * block;
    UNROLL
    for (int b = 0; b < blocks; b++) __builtin_prefetch(w + b * block + ahead, 0, 2);
#ifdef __AVX512BF16__
    if (mode == PAIRS) {
      UNROLL
      for (int r = 0; r < rows; r++) {
        int two;
        memcpy(&two, x + 2 * (r * width + i), 4);
        UNROLL
        for (int b = 0; b < blocks; b++)
          sum[r][b] = (F)_mm512_dpbf16_ps((__m512)sum[r][b], (__m512bh)_mm512_set1_epi32(two),
                                          (__m512bh)_mm512_loadu_si512(w + b * L * width * 2));
      }
      continue;
    }
#endif
    // Row by row: a number of a row is read into a register, and then needed no more.
    F even[BLOCKS], odd[BLOCKS] = {};
    UNROLL
    for (int b = 0; b < blocks; b++) {
      const char *at = w + b * L * width * size;
      if (mode == FLOATS) even[b] = *(const F *)at;
      else if (mode == WIDE) {
        even[b] = (F)(*(const U *)at << 16);
        odd[b] = (F)(*(const U *)at & 0xffff0000u);
      } else even[b] = from_halves(*(const H *)at);
    }
    UNROLL
    for (int r = 0; r < rows; r++) {
      const float *row = (const float *)x + r * width + i;
      UNROLL
      for (int b = 0; b < blocks; b++) sum[r][b] = add(even[b], all(row[0]), sum[r][b]);
      if (mode != WIDE) continue;
      UNROLL
      for (int b = 0; b < blocks; b++) sum[r][b] = add(odd[b], all(row[1]), sum[r][b]);
    }
  }
  UNROLL
  for (int r = 0; r < rows; r++)
    UNROLL
    for (int b = 0; b < blocks; b++) sums[r * BLOCKS + b] = sum[r][b];
}

#define CASE(r, b) case r * 8 + b: \
  if (mode == PAIRS) tile(x, w, sums, width, r, b, PAIRS, again); \
  else if (mode == WIDE) tile(x, w, sums, width, r, b, WIDE, again); \
  else if (mode == HALVES) tile(x, w, sums, width, r, b, HALVES, again); \
  else tile(x, w, sums, width, r, b, FLOATS, again); \
  break;
#define CASES(r) CASE(r, 1) CASE(r, 2) CASE(r, 3) CASE(r, 4)
static void tiles(const char *x, const char *w, F *sums, int64_t width, int rows, int blocks, Mode mode, int again) {
  switch (rows * 8 + blocks) {
#ifdef __AVX512F__
    CASES(1) CASES(2) CASES(3) CASES(4) CASES(5) CASES(6)
    CASE(7, 1) CASE(7, 2) CASE(7, 3) CASE(8, 1) CASE(8, 2) CASE(8, 3)
#else
    CASE(1, 1) CASE(1, 2) CASE(2, 1) CASE(2, 2) CASE(3, 1) CASE(3, 2) CASE(4, 1) CASE(4, 2)
#endif
  }
}

// To rows r0 on of y, which lie `row` numbers apart.
static void finish(const float *sums, int64_t stride, void *y, int64_t row, const void *bias, int64_t out, int half,
                   int64_t r0, int rows, int64_t o0, int64_t columns) {
  int64_t end = MIN(o0 + columns, out);
  for (int r = 0; r < rows; r++) {
    const float *sum = sums + r * stride - o0;
    int64_t o = o0, at = (r0 + r) * row;
    for (; o + L <= end; o += L)
      store(y, at + o, *(const F *)(sum + o) + (bias ? load(bias, o, half) : (F){}), half);
    for (; o < end; o++) put(y, at + o, bias ? sum[o] + get(bias, o, half) : sum[o], half);
  }
}

// y [n, out] = x [n, in] weight^T + bias; x, bias and y are bfloat16 (`half`) or float32. Rows of y lie `row` numbers
// apart; 0: `out`.
typedef struct {
  const void *weight, *bias;
  int64_t in, out;
  int form, half, threads;
  int64_t row;
} Linear;

#include "eight_bits.c"

// Copies outputs [many] of a packed weight to places [many] in another one, of as many inputs and the same form.
// out, to_out: outputs of each.
int copy_outputs(const void *packed, void *to, const int64_t *outputs, const int64_t *places, int64_t many, int64_t in,
                 int64_t out, int64_t to_out, int form) {
  int64_t width = form >= Q8_0 ? 0 : (in + 31) / 32 * 32;
  for (int64_t r = 0; r < many; r++) {
    if (form >= Q8_0) copy_eights(packed, to, outputs[r], places[r], in, out, to_out, form);
    for (int64_t i = 0; i < width; i++) {
      int64_t from = place_of(outputs[r], i, width, form), at = place_of(places[r], i, width, form);
      if (form == SINGLE) ((uint32_t *)to)[at] = ((const uint32_t *)packed)[from];
      else ((uint16_t *)to)[at] = ((const uint16_t *)packed)[from];
    }
  }
  return DONE;
}

// How products read rows [n, width]: `in` is padded; in floats (`size` 4) unless they take bfloat16; a row has `bytes`.
// unit: threads share outputs in multiples of it.
// amx: whether the matrix unit multiplies them.
typedef struct { Mode mode; int amx, half; int64_t in, width, size, bytes, unit; } Rows;

static Rows rows_for(int64_t in, int form, int half) {
  static const Mode modes[] = {WIDE, HALVES, FLOATS, ROUNDED, ROUNDED, ROUNDED};
  Rows rows = {modes[form], 0, half, in, (in + 31) / 32 * 32, 4, 0, L};
#ifdef __AVX512BF16__
  if (half && form == PAIRED) rows.mode = PAIRS;
#endif
#ifdef AMX
  rows.amx = (rows.mode == PAIRS || rows.mode == ROUNDED) && is_amx_allowed();
#endif
  if (rows.mode == PAIRS) rows.size = 2;
  rows.bytes = form >= Q8_0 ? eights_row_bytes(in) : rows.width * rows.size;
  return rows;
}

static int64_t padded(const Rows *f, int64_t n) {
  return f->amx && f->mode == PAIRS && n > 16 ? (n + 15) / 16 * 16 : n;
}

static void read_row(const Rows *f, const void *x, char *to, int64_t r) {
  char *row = to + r * f->bytes;
  if (f->mode == ROUNDED) {
    const char *from = (const char *)x + r * f->in * (f->half ? 2 : 4);
    for (int64_t b = 0; b < f->in / EIGHTS_BLOCK; b++) round_block(from, row, f->in, b, f->half);
    return;
  }
  if (!f->half || f->size == 2) memcpy(row, (const char *)x + r * f->in * f->size, f->in * f->size);
  else for (int64_t i = 0; i < f->in; i++) ((float *)row)[i] = wide(((const uint16_t *)x)[r * f->in + i]);
  memset(row + f->in * f->size, 0, (f->width - f->in) * f->size);
}

// The first of the outputs that thread t takes, in units of L or more outputs.
static int64_t first_of(int64_t out, int64_t unit, int threads, int t) {
  int64_t units = (out + unit - 1) / unit, each = (units + threads - 1) / threads;
  return MIN(t * each * unit, out);
}

// The outputs of thread t. x: rows as `f` tells.
static void share(const Linear *a, const Rows *f, const char *x, void *y, int64_t n, int t) {
  int64_t from = first_of(a->out, f->unit, a->threads, t), to = first_of(a->out, f->unit, a->threads, t + 1);
  int64_t width = f->width, row = a->row ? a->row : a->out;
  if (f->mode == ROUNDED) {
    multiply_eights(x, a, y, row, n, from, to, f->amx);
    return;
  }
#ifdef AMX
  if (f->amx) {
    int64_t end = (to + L - 1) / L;
    if (from < to) multiply_by_amx((const void *)x, a->weight, y, row, a->bias, n, width, a->out, from / L, end);
    return;
  }
#endif
  F sums[ROWS * BLOCKS];
  int64_t passes = (n + ROWS - 1) / ROWS, each = (n + passes - 1) / passes;  // rows of a pass
  int most = each > FEW_ROWS ? BLOCKS_OF_MANY : BLOCKS;
  for (int64_t o = from; o < to; o += most * L)
    for (int64_t r = 0; r < n; r += each) {
      int rows = MIN(each, n - r), many = MIN(most, (to - o + L - 1) / L);
      const char *w = (const char *)a->weight + o * width * (f->mode == FLOATS ? 4 : 2);
      tiles(x + r * width * f->size, w, sums, width, rows, many, f->mode, r > 0);
      finish((float *)sums, BLOCKS * L, y, row, a->bias, a->out, a->half, r, rows, o, many * L);
    }
}

// The outputs of this thread of a region; all threads call it.
static void share_all(const Linear *a, const Rows *f, const char *x, void *y, int64_t n) {
  for (int t = omp_get_thread_num(); t < a->threads; t += omp_get_num_threads()) share(a, f, x, y, n, t);
}

int linear(const Linear *a, const void *x, void *y, int64_t n) {
  if (!n) return DONE;
  Rows f = rows_for(a->in, a->form, a->half);
  char *copy = NULL;
  if (f.mode == ROUNDED || f.width != f.in || padded(&f, n) != n || (f.half && f.size == 4)) {
    copy = malloc(padded(&f, n) * f.bytes);
    if (!copy) return NO_MEMORY;
  }
  Team team = {};
  Linear shared = *a;
  shared.threads = choose_threads(a->threads);
  double begun = omp_get_wtime();
#pragma omp parallel num_threads(shared.threads)
  {
    if (copy) {
      for (int64_t r = first_item(n); r < end_item(n); r++) read_row(&f, x, copy, r);
      meet(&team);
    }
    share_all(&shared, &f, copy ? copy : x, y, n);
    meet(&team);
  }
  end_region(&team, shared.threads, begun);
  free(copy);
  return DONE;
}

#include "attention.c"

// --- Ranking ------------------------------------------------------------------------------------

// Puts x among numbers in descending order, behind equal ones; the last of them falls out.
INLINE void insert(float x, int64_t token, float *best, int64_t *tokens, int64_t many) {
  int64_t i = many - 1;
  for (; i > 0 && best[i - 1] < x; i--) best[i] = best[i - 1], tokens[i] = tokens[i - 1];
  best[i] = x, tokens[i] = token;
}

// The k most likely tokens of each row of logits [rows, size], and their probabilities: the softmax of logits * scale.
int rank(const void *logits, float *best, int64_t *tokens, int64_t rows, int64_t size, int64_t k, float scale,
         int half, int threads) {
#pragma omp parallel for num_threads(MIN(choose_threads(threads), rows))
  for (int64_t r = 0; r < rows; r++) {
    const char *row = (const char *)logits + r * size * (half ? 2 : 4);
    float *top = best + r * k, sum = 0;
    int64_t *top_tokens = tokens + r * k;
    int64_t i = 0;

    // 1. The largest, from the first k on.
    for (; i < k; i++) insert(get(row, i, half), i, top, top_tokens, i + 1);
    for (; i < size; i++) {
      if (i + L <= size) {
        F x = load(row, i, half);
        if (!any(x > all(top[k - 1]))) { i += L - 1; continue; }
      }
      float x = get(row, i, half);
      if (x > top[k - 1]) insert(x, i, top, top_tokens, k);
    }

    // 2. Their probabilities.
    F sums[SIDES] = {}, largest = all(top[0]);
    for (i = 0; i + SIDES * L <= size; i += SIDES * L)
      for (int s = 0; s < SIDES; s++) sums[s] += exponential((load(row, i + s * L, half) - largest) * scale);
    for (; i < size; i++) sum += exponential((all(get(row, i, half)) - largest) * scale)[0];
    for (int c = 0; c < SIDES * L; c++) sum += sums[c / L][c % L];
    for (i = 0; i < k; i++) top[i] = exponential((all(top[i]) - largest) * scale)[0] / sum;
  }
  return DONE;
}

// --- Choice -------------------------------------------------------------------------------------

INLINE F scaled_logits(const void *logits, int64_t i, float temperature, int half) {
  F x = load(logits, i, half);
  if (temperature != 1) x = x / temperature;
  return x;
}

INLINE float scaled_logit(const void *logits, int64_t i, float temperature, int half) {
  float x = get(logits, i, half);
  return temperature == 1 ? x : x / temperature;
}

// The token with the largest logit / temperature, of equal ones the first; `size` if a logit is NaN.
static int64_t most_likely(const void *logits, int64_t size, float temperature, int half) {
  F largest = all(-INFINITY);
  I wrong = {};
  float best = -INFINITY;
  int64_t i = 0;
  for (; i + L <= size; i += L) {
    F x = scaled_logits(logits, i, temperature, half);
    wrong |= x != x;
    largest = larger(x, largest);
  }
  if (any(wrong)) return size;
  for (int c = 0; c < L; c++) best = largest[c] > best ? largest[c] : best;
  for (; i < size; i++) {
    float x = scaled_logit(logits, i, temperature, half);
    if (x != x) return size;
    best = x > best ? x : best;
  }
  for (i = 0; i + L <= size && !any(scaled_logits(logits, i, temperature, half) == best); ) i += L;
  while (scaled_logit(logits, i, temperature, half) != best) i++;
  return i;
}

typedef struct { float score; int64_t token; } Scored;

INLINE Scored better(Scored a, Scored b) {  // of equal scores the first token's
  return b.score > a.score || (b.score == a.score && b.token < a.token) ? b : a;
}

// The best of the tokens first, first + 1, ... and a choice, by x = logit / temperature plus noise. A token can only
// be the best if its noise is at least best - x, so its u at least exp(-exp(x - best)), and 1 - u at most
// exp(x - best). Few are: only their logarithms are computed.
static Scored choose_in_block(Scored best, const void *logits, uint64_t start, int64_t first, int64_t many,
                              float temperature, int half) {
  enum { BLOCK = 256 };
  float rests[BLOCK];  // 1 - u, rounded down
  for (int64_t from = first; from < first + many; from += BLOCK) {
    int64_t count = MIN(BLOCK, first + many - from);
#pragma omp simd
    for (int64_t i = 0; i < count; i++) rests[i] = (0x7fffffff - (int32_t)(draw_bits(start, from + i) >> 22)) * 0x1p-31f;
    for (int64_t i = 0; i < count; i += L) {
      if (i + L <= count) {
        float slack = 1e-3f + 1e-6f * fabsf(best.score);  // for what is rounded here and in a score
        F lead = scaled_logits(logits, from + i, temperature, half) - best.score + slack;
        F chance = exponential(-larger(-lead, (F){}));
        if (!any(load(rests, i, 0) <= chance)) continue;
      }
      for (int64_t c = from + i; c < from + MIN(i + L, count); c++) {
        float noise = -lnf(waiting_time(draw_bits(start, c)));
        best = better(best, (Scored){scaled_logit(logits, c, temperature, half) + noise, c});
      }
    }
  }
  return best;
}

// The token with the largest score, of equal ones the first; `size` if a logit is NaN. A score is logit / temperature
// plus the noise of the stream from `start`. start: may be NULL: without noise.
int64_t choose(const void *logits, const int64_t *start, int64_t size, float temperature, int half, int threads) {
  enum { BLOCK = 4096 };
  int64_t token = most_likely(logits, size, temperature, half);
  if (!start || token == size) return token;
  float largest = scaled_logit(logits, token, temperature, half);
  if (isinf(largest)) return token;
  Scored best = {largest - lnf(waiting_time(draw_bits(*start, token))), token};
#pragma omp parallel num_threads(choose_threads(threads)) if (size > BLOCK)
  {
    Scored own = best;
#pragma omp for nowait
    for (int64_t first = 0; first < size; first += BLOCK)
      own = choose_in_block(own, logits, *start, first, MIN(BLOCK, size - first), temperature, half);
#pragma omp critical
    best = better(best, own);
  }
  return best.token;
}

// Scores [rows, size] of draft tokens: logits * factor, rounded as logits are, / temperature, plus noise [size].
int score(const void *logits, const float *noise, float *scores, int64_t rows, int64_t size, float factor,
          float temperature, int half) {
  for (int64_t r = 0; r < rows; r++)
    for (int64_t i = 0; i < size; i++) {
      float x = get(logits, r * size + i, half);
      if (factor != 1) put(&x, 0, x * factor, half), x = get(&x, 0, half);
      if (temperature != 1) x = x / temperature;
      scores[r * size + i] = x + noise[i];
    }
  return DONE;
}

// --- Columns ------------------------------------------------------------------------------------

// Copies columns of blocks [rows, heads, capacity, bytes]. moves: [many, 3] row, source and place; they run in order.
int copy_columns(char *const *blocks, const int64_t *moves, int64_t count, int64_t many, int64_t heads,
                 int64_t capacity, int64_t bytes, int threads) {
#pragma omp parallel for num_threads(MIN(choose_threads(threads), count))
  for (int64_t i = 0; i < count; i++)
    for (const int64_t *move = moves; move < moves + 3 * many; move += 3)
      for (int64_t head = 0; head < heads; head++) {
        char *columns = blocks[i] + (move[0] * heads + head) * capacity * bytes;
        memcpy(columns + move[2] * bytes, columns + move[1] * bytes, bytes);
      }
  return DONE;
}
