// Products in eight bits. `kernels.c` includes this file.
//
// A weight has a scale d for each output and each block of 32 inputs, in half precision, and numbers q from -128 to 127,
// as GGUF's Q8_0. Rows are rounded to the same form, with a scale in single precision: the largest |x| of a block is 127.
//
//   y  =  sum over blocks, in floats, in their order     of     (sum of 32 products q q')     *     (d d')
//                                                             in integers, in any order
//
// Sums of integers are exact, and each step in floats is rounded for itself. So a number has the same bits with every
// instruction set, whatever other rows there are.

enum { EIGHTS_BLOCK = 32, EIGHTS_BYTES = 34 };  // numbers of a block, and bytes with its scale

// Four inputs of each output are multiplied at once where the processor does that, or else two, whose numbers are
// widened to 16 bits first. EIGHTS_SHIFT: packed numbers have this added, where the processor takes them without sign.
// EIGHTS_UNSIGNED: as such a processor, in plain C.
#if (L == 16 && defined(__AVX512VNNI__)) || (L == 8 && defined(__AVXVNNI__)) || defined(EIGHTS_UNSIGNED)
#define EIGHTS_STEP 4
#define EIGHTS_SHIFT 128
typedef int8_t RowNumber;
#elif defined(__ARM_FEATURE_DOTPROD)
#define EIGHTS_STEP 4
#define EIGHTS_SHIFT 0
typedef int8_t RowNumber;
#else
#define EIGHTS_STEP 2
#define EIGHTS_SHIFT 0
typedef int16_t RowNumber;
#endif
typedef int8_t Packed __attribute__((vector_size(EIGHTS_STEP * L), aligned(1), may_alias));
typedef RowNumber Factors __attribute__((vector_size(EIGHTS_STEP * L * sizeof(RowNumber)), aligned(4), may_alias));
typedef RowNumber RowPart __attribute__((vector_size(L * sizeof(RowNumber)), aligned(1), may_alias));

// The most rows and panels of L outputs of a tile.
#if L == 16
enum { EIGHTS_ROWS = 8, EIGHTS_PANELS = 2 };
#else
enum { EIGHTS_ROWS = 6, EIGHTS_PANELS = 2 };
#endif

// --- Weights ----------------------------------------------------------------------------------------
// In a packed weight numbers lie as [out / L, in / STEP, L, STEP], and then scales as [out / L, in / 32, L].

INLINE int64_t eights_place(int64_t o, int64_t i, int64_t in) {
  return o / L * L * in + i / EIGHTS_STEP * EIGHTS_STEP * L + o % L * EIGHTS_STEP + i % EIGHTS_STEP;
}

static const uint16_t *eights_scales(const void *packed, int64_t in, int64_t out) {
  return (const uint16_t *)((const char *)packed + (out + L - 1) / L * L * in);
}

// blocks [out, in / 32]: the scale and the 32 numbers of each, as GGUF's Q8_0 stores them.
int pack_eights(const char *blocks, void *packed, int64_t in, int64_t out) {
  int64_t count = in / EIGHTS_BLOCK;
  uint16_t *scales = (uint16_t *)eights_scales(packed, in, out);
#pragma omp parallel for
  for (int64_t o = 0; o < (out + L - 1) / L * L; o++)
    for (int64_t b = 0; b < count; b++) {
      char block[EIGHTS_BYTES] = {};
      if (o < out) memcpy(block, blocks + (o * count + b) * EIGHTS_BYTES, EIGHTS_BYTES);
      memcpy(scales + (o / L * count + b) * L + o % L, block, 2);
      for (int i = 0; i < EIGHTS_BLOCK; i++)
        ((char *)packed)[eights_place(o, b * EIGHTS_BLOCK + i, in)] = (char)(block[2 + i] + EIGHTS_SHIFT);
    }
  return DONE;
}

int unpack_eights(const void *packed, char *blocks, int64_t in, int64_t out) {
  int64_t count = in / EIGHTS_BLOCK;
  const uint16_t *scales = eights_scales(packed, in, out);
#pragma omp parallel for
  for (int64_t o = 0; o < out; o++)
    for (int64_t b = 0; b < count; b++) {
      char *block = blocks + (o * count + b) * EIGHTS_BYTES;
      memcpy(block, scales + (o / L * count + b) * L + o % L, 2);
      for (int i = 0; i < EIGHTS_BLOCK; i++)
        block[2 + i] = (char)(((const char *)packed)[eights_place(o, b * EIGHTS_BLOCK + i, in)] - EIGHTS_SHIFT);
    }
  return DONE;
}

// Copies an output of a packed weight to a place in another one.
static void copy_eights(const void *packed, void *to, int64_t output, int64_t place, int64_t in, int64_t out,
                        int64_t to_out) {
  int64_t count = in / EIGHTS_BLOCK;
  const uint16_t *scales = eights_scales(packed, in, out);
  uint16_t *to_scales = (uint16_t *)eights_scales(to, in, to_out);
  for (int64_t i = 0; i < in; i++)
    ((char *)to)[eights_place(place, i, in)] = ((const char *)packed)[eights_place(output, i, in)];
  for (int64_t b = 0; b < count; b++)
    to_scales[(place / L * count + b) * L + place % L] = scales[(output / L * count + b) * L + output % L];
}

// --- Rows -------------------------------------------------------------------------------------------
// A row lies as numbers [in], then scales [in / 32], then what the sum of each block begins with [in / 32].

static int64_t eights_row_bytes(int64_t in) {
  return in * (int64_t)sizeof(RowNumber) + in / EIGHTS_BLOCK * (int64_t)(sizeof(float) + sizeof(int32_t));
}

// Rounds block b of a row x [in] to `row`. A block with an infinite number or NaN gets NaN as its scale.
static void round_block(const void *x, char *row, int64_t in, int64_t b, int half) {
  enum { VECTORS = EIGHTS_BLOCK / L };
  F values[VECTORS];
  I largest = {}, sum = {};
  for (int v = 0; v < VECTORS; v++) {
    values[v] = load(x, b * EIGHTS_BLOCK + v * L, half);
    I size = (I)values[v] & 0x7fffffff;  // these integers have the order of their numbers
    I first = size > largest;
    largest = (size & first) | (largest & ~first);
  }
  union { int32_t i; float f; } most = {0};
  for (int c = 0; c < L; c++) most.i = MAX(most.i, largest[c]);
  int finite = most.i < 0x7f800000;
  float inverse = finite && most.f > 0x1p-100f ? 127 / most.f : 0;
  RowNumber *numbers = (RowNumber *)row + b * EIGHTS_BLOCK;
  float *scales = (float *)(row + in * sizeof(RowNumber)) + b;
  for (int v = 0; v < VECTORS; v++) {
    F value = (F)((I)values[v] & -finite) * inverse;
    I number = (I)(value + 12582912.0f) - 0x4b400000;  // rounds to a whole number, ties to even
    sum += number;
    *(RowPart *)(numbers + v * L) = __builtin_convertvector(number, RowPart);
  }
  *scales = finite ? most.f / 127 : NAN;
  if (!EIGHTS_SHIFT) return;
  int32_t all_numbers = 0;
  for (int c = 0; c < L; c++) all_numbers += sum[c];
  ((int32_t *)scales)[in / EIGHTS_BLOCK] = -EIGHTS_SHIFT * all_numbers;
}

// --- Products ---------------------------------------------------------------------------------------

INLINE Factors factors_at(const char *w) {  // the next STEP inputs of L outputs
#if EIGHTS_STEP == 2 && L == 16 && defined(__AVX512BW__)
  return (Factors)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const void *)w));
#elif EIGHTS_STEP == 2 && L == 8 && defined(__AVX2__)
  return (Factors)_mm256_cvtepi8_epi16(_mm_loadu_si128((const void *)w));
#else
  return __builtin_convertvector(*(const Packed *)w, Factors);
#endif
}

// The sums of L outputs, and STEP products of each. numbers: of the row, in the order of their bytes.
INLINE I add_products(I sums, Factors w, int32_t numbers) {
#if defined(EIGHTS_UNSIGNED)
  for (int c = 0; c < L * EIGHTS_STEP; c++) sums[c / EIGHTS_STEP] += (uint8_t)w[c] * (int8_t)(numbers >> c % EIGHTS_STEP * 8);
  return sums;
#elif L == 16 && defined(__AVX512VNNI__)
  return (I)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)w, _mm512_set1_epi32(numbers));
#elif L == 8 && defined(__AVXVNNI__)
  return (I)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)w, _mm256_set1_epi32(numbers));
#elif defined(__ARM_FEATURE_DOTPROD)
  return (I)vdotq_s32((int32x4_t)sums, (int8x16_t)w, vreinterpretq_s8_s32(vdupq_n_s32(numbers)));
#elif L == 16 && defined(__AVX512BW__)
  return sums + (I)_mm512_madd_epi16((__m512i)w, _mm512_set1_epi32(numbers));
#elif L == 8 && defined(__AVX2__)
  return sums + (I)_mm256_madd_epi16((__m256i)w, _mm256_set1_epi32(numbers));
#elif L == 4 && defined(__SSE2__)
  return sums + (I)_mm_madd_epi16((__m128i)w, _mm_set1_epi32(numbers));
#else
  I even = (I)w << 16 >> 16, odd = (I)w >> 16;
  return sums + even * (int16_t)numbers + odd * (numbers >> 16);
#endif
}

// rows x panels of outputs. x: rows of `row_bytes`; w, scales: of the first panel.
INLINE void eights_tile(const char *x, int64_t row_bytes, const char *w, const uint16_t *scales, F *sums, int64_t in,
                        int rows, int panels, int again) {
  enum { STEPS = EIGHTS_BLOCK / EIGHTS_STEP, NUMBERS = EIGHTS_STEP * sizeof(RowNumber) };
  F sum[EIGHTS_ROWS][EIGHTS_PANELS] = {};
  int64_t blocks = in / EIGHTS_BLOCK, panel = L * in, ahead = again ? panels * panel : AHEAD;
  for (int64_t b = 0; b < blocks; b++) {
    I part[EIGHTS_ROWS][EIGHTS_PANELS];
    const char *scale_row = x + in * sizeof(RowNumber) + b * sizeof(float);
    UNROLL
    for (int r = 0; r < rows; r++) {
      int32_t start = 0;
      if (EIGHTS_SHIFT) start = *(const int32_t *)(scale_row + r * row_bytes + blocks * sizeof(float));
      UNROLL
      for (int p = 0; p < panels; p++) part[r][p] = start - (I){};
    }
    if (!again && (blocks - b) * EIGHTS_BLOCK * L <= AHEAD) ahead = AHEAD + (panels - 1) * panel;
    UNROLL
    for (int p = 0; p < panels; p++)
      for (int line = 0; line < EIGHTS_BLOCK * L; line += 64)
        __builtin_prefetch(w + p * panel + ahead + line, 0, 2);
#pragma GCC unroll 2
    for (int s = 0; s < STEPS; s++) {
      Factors factors[EIGHTS_PANELS];
      UNROLL
      for (int p = 0; p < panels; p++) factors[p] = factors_at(w + p * panel + s * EIGHTS_STEP * L);
      UNROLL
      for (int r = 0; r < rows; r++) {
        int32_t numbers;
        memcpy(&numbers, x + r * row_bytes + (b * STEPS + s) * NUMBERS, 4);
        UNROLL
        for (int p = 0; p < panels; p++) part[r][p] = add_products(part[r][p], factors[p], numbers);
      }
    }
    F weight_scales[EIGHTS_PANELS];
    UNROLL
    for (int p = 0; p < panels; p++) weight_scales[p] = from_halves(*(const H *)(scales + (p * blocks + b) * L));
    UNROLL
    for (int r = 0; r < rows; r++) {
      float row_scale = *(const float *)(scale_row + r * row_bytes);
      UNROLL
      for (int p = 0; p < panels; p++)
        sum[r][p] += __builtin_convertvector(part[r][p], F) * (weight_scales[p] * row_scale);
    }
    w += EIGHTS_BLOCK * L;
  }
  UNROLL
  for (int r = 0; r < rows; r++)
    UNROLL
    for (int p = 0; p < panels; p++) sums[r * EIGHTS_PANELS + p] = sum[r][p];
}

#define EIGHTS_CASE(r, p) case r * 8 + p: eights_tile(x, row_bytes, w, scales, sums, in, r, p, again); break;
#define EIGHTS_CASES(r) EIGHTS_CASE(r, 1) EIGHTS_CASE(r, 2)
static void eights_tiles(const char *x, int64_t row_bytes, const char *w, const uint16_t *scales, F *sums, int64_t in,
                         int rows, int panels, int again) {
  switch (rows * 8 + panels) {
    EIGHTS_CASES(1) EIGHTS_CASES(2) EIGHTS_CASES(3) EIGHTS_CASES(4) EIGHTS_CASES(5) EIGHTS_CASES(6)
#if L == 16
    EIGHTS_CASES(7) EIGHTS_CASES(8)
#endif
  }
}

// Outputs [from, to) of n rows x, rounded to eight bits.
static void multiply_eights(const char *x, const void *packed, void *y, int64_t row, const void *bias, int64_t n,
                            int64_t in, int64_t out, int64_t from, int64_t to, int half) {
  F sums[EIGHTS_ROWS * EIGHTS_PANELS];
  const uint16_t *scales = eights_scales(packed, in, out);
  int64_t row_bytes = eights_row_bytes(in);
  int64_t passes = (n + EIGHTS_ROWS - 1) / EIGHTS_ROWS, each = (n + passes - 1) / passes;  // rows of a pass
  for (int64_t o = from; o < to; o += EIGHTS_PANELS * L)
    for (int64_t r = 0; r < n; r += each) {
      int rows = MIN(each, n - r), panels = MIN(EIGHTS_PANELS, (to - o + L - 1) / L);
      const char *w = (const char *)packed + o * in;
      eights_tiles(x + r * row_bytes, row_bytes, w, scales + o * (in / EIGHTS_BLOCK), sums, in, rows, panels, r > 0);
      finish((float *)sums, EIGHTS_PANELS * L, y, row, bias, out, half, r, rows, o, panels * L);
    }
}
