// Products by weights in eight or four bits, of rows in eight. `kernels.c` includes this file.
//
// A weight has a scale d for each output and each block of 32 inputs, in half precision, as in GGUF's formats:
//
//            numbers q       weight
//   Q8_0   -128 ... 127      d q
//   Q4_0      0 ... 15       d (q - 8)
//   Q4_1      0 ... 15       d q + m            m in half precision, too
//
// Rows are rounded to numbers x as those of Q8_0, with a scale s in single precision: the largest |x| of a block is 127.
//
//   y  =  sum over blocks, in floats, in their order     of     (sum of 32 products q x)     *     (d s)
//                                                             in integers, in any order
//
// Of Q4_0 the sum of 8 x is subtracted in integers; of Q4_1 the floats' sum goes on with (sum of x) * (m s). Sums of
// integers are exact, and each step in floats is rounded for itself. So a number has the same bits with every
// instruction set, whatever other rows there are.

enum { EIGHTS_BLOCK = 32 };  // numbers of a block

INLINE int bits_of(int form) { return form == Q8_0 ? 8 : 4; }
INLINE int halves_of(int form) { return form == Q4_1 ? 2 : 1; }  // d, m
INLINE int64_t block_bytes(int form) { return 2 * halves_of(form) + EIGHTS_BLOCK / 8 * bits_of(form); }

// Four inputs of each output are multiplied at once where the processor does that, or else two, whose numbers are
// widened to 16 bits first. EIGHTS_SHIFT: packed numbers of eight bits have this added, where the processor takes them
// without sign. EIGHTS_UNSIGNED: as such a processor, in plain C. FOURS_IN_PAIRS: sums of four bits fit 16 bits for a
// whole block, and hold two of its numbers each until it ends.
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
#if (L == 16 && defined(__AVX512BW__)) || (L == 8 && defined(__AVX2__)) || (L == 4 && defined(__SSSE3__))
#define FOURS_IN_PAIRS 1
#endif
#endif
#ifdef FOURS_IN_PAIRS
#define FOURS_STEP 4
#else
#define FOURS_IN_PAIRS 0
#define FOURS_STEP EIGHTS_STEP
#endif
typedef int8_t Packed __attribute__((vector_size(EIGHTS_STEP * L), aligned(1), may_alias));
typedef uint8_t PackedFours __attribute__((vector_size(FOURS_STEP * L), aligned(1), may_alias));
typedef RowNumber Factors __attribute__((vector_size(EIGHTS_STEP * L * sizeof(RowNumber)), aligned(4), may_alias));

// The most rows of a tile, of weights in eight and in four bits, and panels of L outputs: the sums stay in registers.
#if L == 16
enum { EIGHTS_ROWS = 8, FOURS_ROWS = 8, EIGHTS_PANELS = 2 };
#else
enum { EIGHTS_ROWS = 6, FOURS_ROWS = FOURS_IN_PAIRS ? 5 : 6, EIGHTS_PANELS = 2 };
#endif

// --- Weights ----------------------------------------------------------------------------------------
// In a packed weight numbers lie as [out / L, in / STEP, L, STEP], and then scales as [out / L, in / 32, 1 or 2, L]. In
// four bits a byte holds the numbers of two steps, the earlier one in its low half.

INLINE int64_t eights_place(int64_t o, int64_t i, int64_t in, int form) {
  int64_t step = form == Q8_0 ? EIGHTS_STEP : FOURS_STEP, each = 8 / bits_of(form);
  return o / L * L * in / each + i / step / each * step * L + o % L * step + i % step;
}

INLINE int half_place(int64_t i) { return i / FOURS_STEP % 2 * 4; }  // where the four bits of input i begin in their byte

static int number_at(const void *packed, int64_t o, int64_t i, int64_t in, int form) {
  int byte = ((const uint8_t *)packed)[eights_place(o, i, in, form)];
  return form == Q8_0 ? byte - EIGHTS_SHIFT : byte >> half_place(i) & 15;
}

static void put_number(void *packed, int64_t o, int64_t i, int64_t in, int form, int number) {
  uint8_t *byte = (uint8_t *)packed + eights_place(o, i, in, form);
  if (form == Q8_0) *byte = (uint8_t)(number + EIGHTS_SHIFT);
  else *byte = (uint8_t)((*byte & ~(15 << half_place(i))) | number << half_place(i));
}

static const uint16_t *eights_scales(const void *packed, int64_t in, int64_t out, int form) {
  return (const uint16_t *)((const char *)packed + (out + L - 1) / L * L * in * bits_of(form) / 8);
}

INLINE int64_t scale_place(int64_t o, int64_t b, int64_t blocks, int form) {
  return (o / L * blocks + b) * halves_of(form) * L + o % L;
}

// blocks [out, in / 32]: the scale and the 32 numbers of each, as GGUF stores them.
int pack_eights(const char *blocks, void *packed, int64_t in, int64_t out, int form) {
  int64_t count = in / EIGHTS_BLOCK, bytes = block_bytes(form), halves = halves_of(form);
  uint16_t *scales = (uint16_t *)eights_scales(packed, in, out, form);
#pragma omp parallel for
  for (int64_t o = 0; o < (out + L - 1) / L * L; o++)
    for (int64_t b = 0; b < count; b++) {
      uint8_t block[2 + EIGHTS_BLOCK] = {}, *numbers = block + 2 * halves;
      if (o < out) memcpy(block, blocks + (o * count + b) * bytes, bytes);
      for (int64_t h = 0; h < halves; h++) memcpy(scales + scale_place(o, b, count, form) + h * L, block + 2 * h, 2);
      for (int i = 0; i < EIGHTS_BLOCK; i++) {
        int number = form == Q8_0 ? numbers[i] : numbers[i % 16] >> i / 16 * 4 & 15;
        put_number(packed, o, b * EIGHTS_BLOCK + i, in, form, number);
      }
    }
  return DONE;
}

int unpack_eights(const void *packed, char *blocks, int64_t in, int64_t out, int form) {
  int64_t count = in / EIGHTS_BLOCK, bytes = block_bytes(form), halves = halves_of(form);
  const uint16_t *scales = eights_scales(packed, in, out, form);
#pragma omp parallel for
  for (int64_t o = 0; o < out; o++)
    for (int64_t b = 0; b < count; b++) {
      uint8_t *block = (uint8_t *)blocks + (o * count + b) * bytes, *numbers = block + 2 * halves;
      memset(block, 0, bytes);
      for (int64_t h = 0; h < halves; h++) memcpy(block + 2 * h, scales + scale_place(o, b, count, form) + h * L, 2);
      for (int i = 0; i < EIGHTS_BLOCK; i++) {
        int number = number_at(packed, o, b * EIGHTS_BLOCK + i, in, form);
        if (form == Q8_0) numbers[i] = (uint8_t)number;
        else numbers[i % 16] |= (uint8_t)(number << i / 16 * 4);
      }
    }
  return DONE;
}

// Copies an output of a packed weight to a place in another one.
static void copy_eights(const void *packed, void *to, int64_t output, int64_t place, int64_t in, int64_t out,
                        int64_t to_out, int form) {
  int64_t count = in / EIGHTS_BLOCK;
  const uint16_t *scales = eights_scales(packed, in, out, form);
  uint16_t *to_scales = (uint16_t *)eights_scales(to, in, to_out, form);
  for (int64_t i = 0; i < in; i++) put_number(to, place, i, in, form, number_at(packed, output, i, in, form));
  for (int64_t b = 0; b < count; b++)
    for (int64_t h = 0; h < halves_of(form); h++)
      to_scales[scale_place(place, b, count, form) + h * L] = scales[scale_place(output, b, count, form) + h * L];
}

// Reads an output of a packed weight as a row [in] of floats; `half`: of bfloat16.
static void read_eights(const void *packed, int64_t output, void *row, int64_t in, int64_t out, int form, int half) {
  int64_t count = in / EIGHTS_BLOCK;
  const uint16_t *scales = eights_scales(packed, in, out, form);
  for (int64_t b = 0; b < count; b++) {
    uint16_t halves[L] = {};
    float floats[L];
    for (int64_t h = 0; h < halves_of(form); h++) halves[h] = scales[scale_place(output, b, count, form) + h * L];
    *(F *)floats = from_halves(*(const H *)halves);
    for (int64_t i = b * EIGHTS_BLOCK; i < (b + 1) * EIGHTS_BLOCK; i++) {
      int number = number_at(packed, output, i, in, form) - (form == Q4_0 ? 8 : 0);
      float value = number * floats[0];
      put(row, i, form == Q4_1 ? value + floats[1] : value, half);
    }
  }
}

// Reads outputs [many] of a packed weight in blocks as rows [many, in].
int read_outputs(const void *packed, const int64_t *outputs, void *rows, int64_t many, int64_t in, int64_t out, int form,
                 int half, int threads) {
  int64_t bytes = in * (half ? 2 : 4);
#pragma omp parallel for num_threads(many < 64 ? 1 : choose_threads(threads))
  for (int64_t r = 0; r < many; r++) read_eights(packed, outputs[r], (char *)rows + r * bytes, in, out, form, half);
  return DONE;
}

// --- Rows -------------------------------------------------------------------------------------------
// A row lies as numbers [in], scales [in / 32], and the sum of the numbers of each block [in / 32]; then as numbers [in]
// of eight bits, where weights of eight bits take others.

static int64_t small_numbers_place(int64_t in) {
  return in * (int64_t)sizeof(RowNumber) + in / EIGHTS_BLOCK * (int64_t)(sizeof(float) + sizeof(int32_t));
}

static int64_t eights_row_bytes(int64_t in) { return small_numbers_place(in) + (FOURS_IN_PAIRS ? in : 0); }

// Rounds block b of a row x [in] to `row`. A block with an infinite number or NaN gets NaN as its scale. Compilers turn
// the loops over single numbers into vectors, which they do not do with every conversion of vectors.
static void round_block(const void *x, char *row, int64_t in, int64_t b, int half) {
  F values[EIGHTS_BLOCK / L];
  int32_t sizes[EIGHTS_BLOCK], whole[EIGHTS_BLOCK];
  for (int v = 0; v < EIGHTS_BLOCK / L; v++) {
    values[v] = load(x, b * EIGHTS_BLOCK + v * L, half);
    *(I *)(sizes + v * L) = (I)values[v] & 0x7fffffff;  // these integers have the order of their numbers
  }
  union { int32_t i; float f; } most = {0};
  for (int i = 0; i < EIGHTS_BLOCK; i++) most.i = MAX(most.i, sizes[i]);
  int finite = most.i < 0x7f800000;
  float inverse = finite && most.f > 0x1p-100f ? 127 / most.f : 0;
  for (int v = 0; v < EIGHTS_BLOCK / L; v++) {
    F value = (F)((I)values[v] & -finite) * inverse;
    *(I *)(whole + v * L) = (I)(value + 12582912.0f) - 0x4b400000;  // rounds to a whole number, ties to even
  }
  RowNumber *numbers = (RowNumber *)row + b * EIGHTS_BLOCK;
  int8_t *small_numbers = (int8_t *)row + small_numbers_place(in) + b * EIGHTS_BLOCK;
  float *scales = (float *)(row + in * sizeof(RowNumber)) + b;
  int32_t sum = 0;
  for (int i = 0; i < EIGHTS_BLOCK; i++) sum += whole[i];
  for (int i = 0; i < EIGHTS_BLOCK; i++) numbers[i] = (RowNumber)whole[i];
  for (int i = 0; i < EIGHTS_BLOCK && FOURS_IN_PAIRS; i++) small_numbers[i] = (int8_t)whole[i];
  *scales = finite ? most.f / 127 : NAN;
  ((int32_t *)scales)[in / EIGHTS_BLOCK] = sum;
}

// --- Products ---------------------------------------------------------------------------------------

// The numbers of a step of a block, of L outputs, as they are multiplied: the first or second of two from `first` on.
INLINE I factors_at(const char *w, int first, int second, int form) {
  if (form != Q8_0) {
    PackedFours numbers = *(const PackedFours *)(w + first / 2 * FOURS_STEP * L);
    if (second) numbers >>= 4;
    numbers &= 15;
#if FOURS_STEP == 4
    return (I)numbers;
#else
    return (I)__builtin_convertvector(numbers, Factors);
#endif
  }
  w += (first + second) * EIGHTS_STEP * L;
#if EIGHTS_STEP == 2 && L == 16 && defined(__AVX512BW__)
  return (I)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const void *)w));
#elif EIGHTS_STEP == 2 && L == 8 && defined(__AVX2__)
  return (I)_mm256_cvtepi8_epi16(_mm_loadu_si128((const void *)w));
#else
  return (I)__builtin_convertvector(*(const Packed *)w, Factors);
#endif
}

#if !FOURS_IN_PAIRS
INLINE I add_fours(I sums, I w, int32_t numbers) { (void)w, (void)numbers; return sums; }
INLINE I join_pairs(I sums) { return sums; }
#elif L == 16
INLINE I add_fours(I sums, I w, int32_t numbers) {
  return (I)_mm512_add_epi16((__m512i)sums, _mm512_maddubs_epi16((__m512i)w, _mm512_set1_epi32(numbers)));
}
INLINE I join_pairs(I sums) { return (I)_mm512_madd_epi16((__m512i)sums, _mm512_set1_epi16(1)); }
#elif L == 8
INLINE I add_fours(I sums, I w, int32_t numbers) {
  return (I)_mm256_add_epi16((__m256i)sums, _mm256_maddubs_epi16((__m256i)w, _mm256_set1_epi32(numbers)));
}
INLINE I join_pairs(I sums) { return (I)_mm256_madd_epi16((__m256i)sums, _mm256_set1_epi16(1)); }
#else
INLINE I add_fours(I sums, I w, int32_t numbers) {
  return (I)_mm_add_epi16((__m128i)sums, _mm_maddubs_epi16((__m128i)w, _mm_set1_epi32(numbers)));
}
INLINE I join_pairs(I sums) { return (I)_mm_madd_epi16((__m128i)sums, _mm_set1_epi16(1)); }
#endif

// The sums of L outputs, and STEP products of each. numbers: of the row, in the order of their bytes.
INLINE I add_products(I sums, I w, int32_t numbers, int form) {
  if (FOURS_IN_PAIRS && form != Q8_0) return add_fours(sums, w, numbers);
#if defined(EIGHTS_UNSIGNED)
  for (int c = 0; c < L * 4; c++) sums[c / 4] += (uint8_t)((Factors)w)[c] * (int8_t)(numbers >> c % 4 * 8);
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
  I even = w << 16 >> 16, odd = w >> 16;
  return sums + even * (int16_t)numbers + odd * (numbers >> 16);
#endif
}

// Whether two rows and two outputs are multiplied at once, over two steps of inputs.
#if EIGHTS_STEP == 4 && L == 4 && defined(__ARM_FEATURE_MATMUL_INT8)
#define EIGHTS_BY_TWO 1
INLINE void add_products_by_two(I *first_sums, I *second_sums, I w, I next_w, const char *x, const char *next_x) {
  int8x16_t rows = vcombine_s8(vld1_s8((const void *)x), vld1_s8((const void *)next_x));
  int8x16_t outputs = vreinterpretq_s8_s32(vzip1q_s32((int32x4_t)w, (int32x4_t)next_w));
  int8x16_t next_outputs = vreinterpretq_s8_s32(vzip2q_s32((int32x4_t)w, (int32x4_t)next_w));
  *first_sums = (I)vmmlaq_s32((int32x4_t)*first_sums, rows, outputs);
  *second_sums = (I)vmmlaq_s32((int32x4_t)*second_sums, rows, next_outputs);
}
#else
#define EIGHTS_BY_TWO 0
INLINE void add_products_by_two(I *first_sums, I *second_sums, I w, I next_w, const char *x, const char *next_x) {
  (void)first_sums, (void)second_sums, (void)w, (void)next_w, (void)x, (void)next_x;
}
#endif

// Sums of two rows of four outputs, to those of both rows of the first two and of the last two; or back.
INLINE void turn_sums(I *sums, I *next_sums) {
  I first = *sums, second = *next_sums;
  for (int c = 0; c < 2 && L == 4; c++) {
    (*sums)[2 + c] = second[c];
    (*next_sums)[c] = first[2 + c];
  }
}

// The sum of the numbers of block b of a row. scales: of the row.
INLINE int32_t sum_of_block(const char *scales, int64_t b, int64_t blocks) {
  return ((const int32_t *)(scales + blocks * sizeof(float)))[b];
}

INLINE int offset_of(int form) { return form == Q8_0 ? EIGHTS_SHIFT : form == Q4_0 ? 8 : 0; }  // of packed numbers

// The scales of a block of L outputs; least: of Q4_1.
typedef struct { F scale, least; } BlockScales;

INLINE BlockScales read_scales(const uint16_t *scales, int64_t b, int form) {
  const uint16_t *at = scales + b * halves_of(form) * L;
  return (BlockScales){from_halves(*(const H *)at), form == Q4_1 ? from_halves(*(const H *)(at + L)) : (F){}};
}

// Adds block b of a row to the sums of L outputs. whole: the block's sums of products.
INLINE F add_block(F sum, I whole, BlockScales block, const char *row_scales, int64_t b, int64_t blocks, int form) {
  float row_scale = ((const float *)row_scales)[b];
  sum += __builtin_convertvector(whole, F) * (block.scale * row_scale);
  if (form == Q4_1) sum += (float)sum_of_block(row_scales, b, blocks) * (block.least * row_scale);
  return sum;
}

// rows x panels of outputs. x: rows of `row_bytes`; w, scales: of the first panel.
INLINE void eights_tile(const char *x, int64_t row_bytes, const char *w, const uint16_t *scales, F *sums, int64_t in,
                        int rows, int panels, int again, int form) {
  const int pairs = FOURS_IN_PAIRS && form != Q8_0, steps = EIGHTS_BLOCK / (form == Q8_0 ? EIGHTS_STEP : FOURS_STEP);
  const int each = EIGHTS_BY_TWO ? 2 : 8 / bits_of(form);  // steps of the same bytes
  const int by_two = EIGHTS_BY_TWO ? rows / 2 * 2 : 0;     // rows that are multiplied by two
  const int halves = halves_of(form), bytes = EIGHTS_BLOCK * L * bits_of(form) / 8;
  F sum[EIGHTS_ROWS][EIGHTS_PANELS] = {};
  int64_t blocks = in / EIGHTS_BLOCK, panel = blocks * bytes, ahead = again ? panels * panel : AHEAD;
  const char *row_scales = x + in * sizeof(RowNumber), *numbers_of_rows = pairs ? x + small_numbers_place(in) : x;
  for (int64_t b = 0; b < blocks; b++) {
    I part[EIGHTS_ROWS][EIGHTS_PANELS];
    UNROLL
    for (int r = 0; r < rows; r++) {
      int32_t start = -offset_of(form) * sum_of_block(row_scales + r * row_bytes, b, blocks);
      if (pairs) start &= 0xffff;  // to the first of two sums, of which the end, too, is at most 32512 from 0
      UNROLL
      for (int p = 0; p < panels; p++) part[r][p] = start - (I){};
    }
    if (!again && (blocks - b) * bytes <= AHEAD) ahead = AHEAD + (panels - 1) * panel;
    UNROLL
    for (int p = 0; p < panels; p++)
      for (int line = 0; line < bytes; line += 64) __builtin_prefetch(w + p * panel + ahead + line, 0, 2);
    UNROLL
    for (int r = 0; r < by_two; r += 2)
      UNROLL
      for (int p = 0; p < panels; p++) turn_sums(&part[r][p], &part[r + 1][p]);
#pragma GCC unroll 2
    for (int first = 0; first < steps; first += each) {
      UNROLL
      for (int p = 0; p < panels && by_two; p++) {
        I factors = factors_at(w + p * panel, first, 0, form), next_factors = factors_at(w + p * panel, first, 1, form);
        const char *numbers = x + (b * steps + first) * 4;
        UNROLL
        for (int r = 0; r < by_two; r += 2)
          add_products_by_two(&part[r][p], &part[r + 1][p], factors, next_factors, numbers + r * row_bytes,
                              numbers + (r + 1) * row_bytes);
      }
      UNROLL
      for (int s = first; s < first + each; s++) {
        I factors[EIGHTS_PANELS];
        UNROLL
        for (int p = 0; p < panels; p++) factors[p] = factors_at(w + p * panel, first, s - first, form);
        UNROLL
        for (int r = by_two; r < rows; r++) {
          int32_t numbers;
          memcpy(&numbers, numbers_of_rows + r * row_bytes + (b * steps + s) * 4, 4);
          UNROLL
          for (int p = 0; p < panels; p++) part[r][p] = add_products(part[r][p], factors[p], numbers, form);
        }
      }
    }
    UNROLL
    for (int r = 0; r < by_two; r += 2)
      UNROLL
      for (int p = 0; p < panels; p++) turn_sums(&part[r][p], &part[r + 1][p]);
    BlockScales block[EIGHTS_PANELS];
    UNROLL
    for (int p = 0; p < panels; p++) block[p] = read_scales(scales + p * blocks * halves * L, b, form);
    UNROLL
    for (int r = 0; r < rows; r++)
      UNROLL
      for (int p = 0; p < panels; p++) {
        I whole = pairs ? join_pairs(part[r][p]) : part[r][p];
        sum[r][p] = add_block(sum[r][p], whole, block[p], row_scales + r * row_bytes, b, blocks, form);
      }
    w += bytes;
  }
  UNROLL
  for (int r = 0; r < rows; r++)
    UNROLL
    for (int p = 0; p < panels; p++) sums[r * EIGHTS_PANELS + p] = sum[r][p];
}

#define EIGHTS_CASE(r, p) case r * 8 + p: \
  if (form == Q8_0) eights_tile(x, row_bytes, w, scales, sums, in, r, p, again, Q8_0); \
  else if (form == Q4_0) eights_tile(x, row_bytes, w, scales, sums, in, r, p, again, Q4_0); \
  else eights_tile(x, row_bytes, w, scales, sums, in, r, p, again, Q4_1); \
  break;
#define EIGHTS_CASES(r) EIGHTS_CASE(r, 1) EIGHTS_CASE(r, 2)
static void eights_tiles(const char *x, int64_t row_bytes, const char *w, const uint16_t *scales, F *sums, int64_t in,
                         int rows, int panels, int again, int form) {
  switch (rows * 8 + panels) {
    EIGHTS_CASES(1) EIGHTS_CASES(2) EIGHTS_CASES(3) EIGHTS_CASES(4) EIGHTS_CASES(5) EIGHTS_CASES(6)
#if L == 16
    EIGHTS_CASES(7) EIGHTS_CASES(8)
#endif
  }
}

#ifdef AMX
#include "amx.c"
enum { EIGHTS_AT_ONCE = AMX_ROWS };  // the most rows of a pass
#else
enum { EIGHTS_AT_ONCE = EIGHTS_ROWS };
#endif

// Outputs [from, to) of n rows x, rounded to eight bits. amx: whether the matrix unit may multiply them.
static void multiply_eights(const char *x, const Linear *a, void *y, int64_t row, int64_t n, int64_t from, int64_t to,
                            int amx) {
  F sums[EIGHTS_AT_ONCE * EIGHTS_PANELS];
  int64_t in = a->in, row_bytes = eights_row_bytes(in), form = a->form;
  int64_t panel = L * in * bits_of(form) / 8, panel_scales = in / EIGHTS_BLOCK * halves_of(form) * L;
  int64_t most = amx ? EIGHTS_AT_ONCE : form == Q8_0 ? EIGHTS_ROWS : FOURS_ROWS;
  int64_t passes = (n + most - 1) / most, each = (n + passes - 1) / passes;  // rows of a pass
#ifdef AMX
  int shaped = 0;  // the rows for which the matrix unit is set up
#endif
  for (int64_t o = from; o < to; o += EIGHTS_PANELS * L)
    for (int64_t r = 0; r < n; r += each) {
      int rows = MIN(each, n - r), panels = MIN(EIGHTS_PANELS, (to - o + L - 1) / L);
      const char *w = (const char *)a->weight + o / L * panel;
      const uint16_t *scales = eights_scales(a->weight, in, a->out, form) + o / L * panel_scales;
#ifdef AMX
      if (rows > FEW_AMX_ROWS) {
        if (shaped != rows) shape_eights(shaped = rows);
        for (int p = 0; p < panels; p++)
          eights_of_rows(x + r * row_bytes, row_bytes, w + p * panel, scales + p * panel_scales, sums + p, in, rows,
                         r > 0, form);
      } else
#endif
        eights_tiles(x + r * row_bytes, row_bytes, w, scales, sums, in, rows, panels, r > 0, form);
      finish((float *)sums, EIGHTS_PANELS * L, y, row, a->bias, a->out, a->half, r, rows, o, panels * L);
    }
#ifdef AMX
  if (shaped) _tile_release();
#endif
}
