// Holds every kernel to what kernels.c and layer.c promise: results up to rounding, computed again in float64; a row
// alone has the bits of a row in company, with any number of threads; no byte beside a buffer is touched (each has
// exactly its size, so a sanitizer sees it); a failed allocation is told. Last, the bits of all results, which AVX2
// and aarch64 share. `check.sh` compiles and runs it.

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// The kernels' allocations fail when the countdown reaches 0.
static int countdown = -1;
static void *failing_malloc(size_t bytes) { return countdown-- ? malloc(bytes) : NULL; }
static void *failing_aligned_alloc(size_t line, size_t bytes) { return countdown-- ? aligned_alloc(line, bytes) : NULL; }
#define malloc failing_malloc
#define aligned_alloc failing_aligned_alloc
#include "layer.c"
#undef malloc
#undef aligned_alloc

// The digests of products in eight and in four bits, with every instruction set.
#define EIGHTS_BITS 0xfd5f415f7ae8875aULL
#define FOURS_BITS 0x3828b704cbe69379ULL
// The digest of all results where products are fused and vectors hold at most 8 floats.
#define SHARED_BITS 0x3dcc93d55aa3096fULL
#if (defined(__FMA__) && !defined(__AVX512F__)) || defined(__aarch64__)
#define HAS_SHARED_BITS 1
#else
#define HAS_SHARED_BITS 0
#endif

static const int THREADS[] = {1, 2, 3, 7};
enum { THREAD_COUNTS = 4, MOST_ROOMS = 256 };

static int failures = 0;
#define DEMAND(true_, ...) \
  do { \
    if (true_) break; \
    printf("line %d: %s: ", __LINE__, #true_); \
    printf(__VA_ARGS__); \
    printf("\n"); \
    failures++; \
  } while (0)

// --- Buffers and numbers ----------------------------------------------------------------------------

static void *rooms[MOST_ROOMS];
static int room_count = 0;

static void *room(int64_t bytes) {  // until `release_rooms`
  void *x = malloc(bytes);
  if (!x || room_count == MOST_ROOMS) { printf("no room\n"); exit(1); }
  memset(x, 0xcd, bytes);
  return rooms[room_count++] = x;
}

static void release_rooms(void) {
  while (room_count) free(rooms[--room_count]);
}

static int64_t size_of(int half) { return half ? 2 : 4; }

static void *row_at(const void *x, int64_t i, int half) { return (char *)x + i * size_of(half); }

static uint64_t state = 1;
static uint64_t draw(void) {  // SplitMix64
  uint64_t z = state += 0x9E3779B97F4A7C15ULL;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ULL;
  z = (z ^ z >> 27) * 0x94D049BB133111EBULL;
  return z ^ z >> 31;
}

static float uniform(void) { return (draw() >> 40) * 0x1p-23f - 1; }

static void *numbers(int64_t count, int half, float scale) {
  void *x = room(count * size_of(half));
  for (int64_t i = 0; i < count; i++) put(x, i, uniform() * scale, half);
  return x;
}

static void *zeros(int64_t count, int half) { return memset(room(count * size_of(half)), 0, count * size_of(half)); }

static void *copy_of(const void *x, int64_t count, int half) {
  return memcpy(room(count * size_of(half)), x, count * size_of(half));
}

// Weights in blocks; some numbers are as large as they can be.
static void *block_weights(int64_t count, int form, float scale) {
  int64_t bytes = block_bytes(form), numbers = 2 * halves_of(form);
  char *blocks = room(count / EIGHTS_BLOCK * bytes);
  for (int64_t b = 0; b < count / EIGHTS_BLOCK; b++) {
    char *block = blocks + b * bytes;
    uint16_t d = (scale < 1 ? 0x1800 : 0x2000) + draw() % 1024;
    int extreme = draw() % 4 == 0;
    if (form != Q8_0) d += 0x1000;  // its numbers are a sixteenth
    memcpy(block, &d, 2);
    d += 0x8800;  // about -8 d
    if (form == Q4_1) memcpy(block + 2, &d, 2);
    for (int64_t i = numbers; i < bytes; i++) block[i] = (char)(extreme ? 127 + draw() % 2 : draw());
    if (form != Q8_0 && extreme) memset(block + numbers, draw() % 2 ? 0xff : 0, bytes - numbers);
  }
  return blocks;
}

static void *weights(int64_t count, int form, float scale) {
  if (form >= Q8_0) return block_weights(count, form, scale);
  if (form != HALF) return numbers(count, form == PAIRED, scale);
  uint16_t *x = room(count * 2);
  for (int64_t i = 0; i < count; i++) {  // also numbers below the normal ones
    uint64_t bits = draw(), exponent = bits % 8 ? 9 + bits % 4 : 0;
    x[i] = (bits >> 32 & 1) << 15 | exponent << 10 | (bits >> 40 & 1023);
  }
  return x;
}

static double exact_weight(const void *x, int64_t i, int form);

static double half_of(const char *block, int which) {  // the scale, and the least number
  uint16_t half[1];
  memcpy(half, block + 2 * which, 2);
  return exact_weight(half, 0, HALF);
}

static int number_of(const char *block, int i, int form) {
  const unsigned char *numbers = (const unsigned char *)block + 2 * halves_of(form);
  if (form == Q8_0) return (int8_t)numbers[i];
  int number = i < 16 ? numbers[i] % 16 : numbers[i - 16] / 16;
  return form == Q4_0 ? number - 8 : number;
}

static double exact_weight(const void *x, int64_t i, int form) {
  if (form >= Q8_0) {
    const char *block = (const char *)x + i / EIGHTS_BLOCK * block_bytes(form);
    double value = half_of(block, 0) * number_of(block, i % EIGHTS_BLOCK, form);
    return form == Q4_1 ? value + half_of(block, 1) : value;
  }
  if (form != HALF) return get(x, i, form == PAIRED);
  int bits = ((const uint16_t *)x)[i], exponent = bits >> 10 & 31, mantissa = bits & 1023;
  double size = exponent ? ldexp(1024 + mantissa, exponent - 25) : ldexp(mantissa, -24);
  return bits >> 15 ? -size : size;
}

#define NO_BITS 0xcbf29ce484222325ULL
static uint64_t digest = NO_BITS;
static void add_to_digest(const void *x, int64_t bytes) {  // FNV-1a
  for (int64_t i = 0; i < bytes; i++) digest = (digest ^ ((const unsigned char *)x)[i]) * 0x100000001b3ULL;
}

static int equal(const void *x, const void *y, int64_t count, int half) { return !memcmp(x, y, count * size_of(half)); }

// --- Products and norms -----------------------------------------------------------------------------

static void *packed_of(const void *weight, int64_t in, int64_t out, int form) {
  if (form >= Q8_0) {
    int64_t bytes = out * in / EIGHTS_BLOCK * block_bytes(form);
    void *packed = room((out + L - 1) / L * L * in / EIGHTS_BLOCK * block_bytes(form)), *again = room(bytes);
    DEMAND(pack_eights(weight, packed, in, out, form) == DONE, "%d x %d", (int)in, (int)out);
    int is_same = unpack_eights(packed, again, in, out, form) == DONE && !memcmp(weight, again, bytes);
    DEMAND(is_same, "%d x %d form %d", (int)in, (int)out, form);
    return packed;
  }
  void *packed = room((out + L - 1) / L * L * ((in + 31) / 32 * 32) * (form == SINGLE ? 4 : 2));
  DEMAND(pack(weight, packed, in, out, form) == DONE, "%d x %d", (int)in, (int)out);
  return packed;
}

// The outputs y of rows x have the same bits on any number of threads, and each row has those that it has alone.
static void check_company(Linear a, const void *x, const void *y, int64_t n) {
  int64_t in = a.in, out = a.out;
  int half = a.half;
  void *again = room(n * out * size_of(half));
  for (int t = 1; t < THREAD_COUNTS; t++) {
    a.threads = THREADS[t];
    DEMAND(linear(&a, x, again, n) == DONE && equal(y, again, n * out, half), "in %d out %d", (int)in, (int)out);
  }
  for (int64_t r = 0; r < n; r++) {
    linear(&a, row_at(x, r * in, half), again, 1);
    DEMAND(equal(row_at(y, r * out, half), again, out, half), "in %d out %d row %d", (int)in, (int)out, (int)r);
  }
}

static void check_linear(int64_t in, int64_t out, int64_t n, int form, int half) {
  void *weight = weights(in * out, form, 1), *bias = n % 2 ? numbers(out, half, 1) : NULL, *x = numbers(n * in, half, 1);
  void *y = room(n * out * size_of(half));
  Linear a = {packed_of(weight, in, out, form), bias, in, out, form, half, 1, 0};
  DEMAND(linear(&a, x, y, n) == DONE, "in %d out %d", (int)in, (int)out);
  check_company(a, x, y, n);
  for (int64_t r = 0; r < n; r++)
    for (int64_t o = 0; o < out; o++) {
      double sum = bias ? get(bias, o, half) : 0, size = fabs(sum);
      for (int64_t i = 0; i < in; i++) {
        double product = get(x, r * in + i, half) * exact_weight(weight, o * in + i, form);
        sum += product, size += fabs(product);
      }
      double error = fabs(get(y, r * out + o, half) - sum);
      DEMAND(error <= size * in * 0x1p-23 + half * 0x1p-8 * fabs(sum), "in %d out %d: %g", (int)in, (int)out, error);
    }
  add_to_digest(y, n * out * size_of(half));
  release_rooms();
}

// Output o of a row x in eight bits, to the bit: whole numbers in a block, floats over the blocks.
static float product_of_blocks(const void *x, const void *weight, int64_t in, int64_t o, int form, int half) {
  float sum = 0;
  for (int64_t b = 0; b < in; b += EIGHTS_BLOCK) {
    const char *block = (const char *)weight + (o * in + b) / EIGHTS_BLOCK * block_bytes(form);
    float largest = 0;
    for (int64_t i = b; i < b + EIGHTS_BLOCK; i++) largest = fmaxf(largest, fabsf(get(x, i, half)));
    float inverse = largest ? 127 / largest : 0, row_scale = largest / 127;
    int whole = 0, row_sum = 0;
    for (int64_t i = 0; i < EIGHTS_BLOCK; i++) {
      int number = (int)rintf(get(x, b + i, half) * inverse);
      whole += number * number_of(block, i, form), row_sum += number;
    }
    float scales = (float)half_of(block, 0) * row_scale, part = whole * scales;
    sum += part;
    if (form != Q4_1) continue;
    float least = (float)half_of(block, 1) * row_scale, further = row_sum * least;
    sum += further;
  }
  return sum;
}

static void check_blocks(int64_t in, int64_t out, int64_t n, int form, int half) {
  void *weight = weights(in * out, form, 1), *bias = n % 2 ? numbers(out, half, 1) : NULL, *x = numbers(n * in, half, 1);
  void *y = room(n * out * size_of(half)), *wanted = room(size_of(half));
  for (int64_t i = 0; i < n * in; i++)  // blocks of zeros, and of numbers that are all the largest, of both signs or one
    if (i / 32 % 5 < 2) put(x, i, i / 32 % 5 ? (draw() % 2 || (form != Q8_0 && i / 32 % 2) ? 0.7f : -0.7f) : 0, half);
  Linear a = {packed_of(weight, in, out, form), bias, in, out, form, half, 1, 0};
  DEMAND(linear(&a, x, y, n) == DONE, "in %d out %d", (int)in, (int)out);
  check_company(a, x, y, n);
  for (int64_t r = 0; r < n; r++)
    for (int64_t o = 0; o < out; o++) {
      const void *row = row_at(x, r * in, half);
      float sum = product_of_blocks(row, weight, in, o, form, half);
      put(wanted, 0, bias ? sum + get(bias, o, half) : sum, half);
      DEMAND(equal(row_at(y, r * out + o, half), wanted, 1, half), "in %d out %d form %d: %g", (int)in, (int)out, form, sum);
      double exact = bias ? get(bias, o, half) : 0, bound = fabs(exact);
      for (int64_t i = 0; i < in; i++) exact += get(row, i, half) * exact_weight(weight, o * in + i, form);
      for (int64_t i = 0; i < in; i++) bound += 0.7 * fabs(exact_weight(weight, o * in + i, form));
      DEMAND(fabs(get(wanted, 0, half) - exact) <= 0.01 * bound, "in %d form %d: %g of %g", (int)in, form, sum, exact);
    }
  add_to_digest(y, n * out * size_of(half));
  release_rooms();
}

// Outputs that were copied to places of another weight have the bits that they had.
static void check_copied_outputs(int64_t in, int form, int half) {
  enum { OUT = 37, TO_OUT = 21, MANY = 4, N = 3 };
  const int64_t outputs[MANY] = {36, 0, 9, 15}, places[MANY] = {0, 20, 7, 8};
  void *x = numbers(N * in, half, 1), *y = room(N * OUT * size_of(half)), *to_y = room(N * TO_OUT * size_of(half));
  void *from = packed_of(weights(OUT * in, form, 1), in, OUT, form);
  void *to = packed_of(weights(TO_OUT * in, form, 1), in, TO_OUT, form);
  Linear a = {from, NULL, in, OUT, form, half, 1, 0}, b = {to, NULL, in, TO_OUT, form, half, 1, 0};
  void *before = room(N * TO_OUT * size_of(half));
  linear(&b, x, before, N);
  DEMAND(copy_outputs(from, to, outputs, places, MANY, in, OUT, TO_OUT, form) == DONE, "in %d form %d", (int)in, form);
  linear(&a, x, y, N), linear(&b, x, to_y, N);
  for (int64_t r = 0; r < N; r++)
    for (int64_t o = 0; o < TO_OUT; o++) {
      const void *wanted = row_at(before, r * TO_OUT + o, half);
      for (int i = 0; i < MANY; i++) if (places[i] == o) wanted = row_at(y, r * OUT + outputs[i], half);
      DEMAND(equal(row_at(to_y, r * TO_OUT + o, half), wanted, 1, half), "in %d form %d place %d", (int)in, form, (int)o);
    }
  release_rooms();
}

// A row with a number that is none gives NaN, and does not change other rows; its smallest numbers give 0.
static void check_blocks_of_nan(int form) {
  enum { IN = 64, OUT = 5 };
  const uint32_t patterns[] = {0x7fc00000, 0xff800001, 0x7f800000, 0xff800000};
  Linear a = {packed_of(weights(IN * OUT, form, 1), IN, OUT, form), NULL, IN, OUT, form, 0, 1, 0};
  float *x = numbers(2 * IN, 0, 1), y[2 * OUT], alone[OUT];
  linear(&a, x + IN, alone, 1);
  for (int i = 0; i < 4; i++) {
    memcpy(x + 40, &patterns[i], 4);
    linear(&a, x, y, 2);
    for (int o = 0; o < OUT; o++) DEMAND(y[o] != y[o], "%x", patterns[i]);
    DEMAND(equal(y + OUT, alone, OUT, 0), "%x", patterns[i]);
  }
  for (int i = 0; i < IN; i++) x[i] = i % 2 ? 1e-42f : -1e-36f;
  linear(&a, x, y, 1);
  for (int o = 0; o < OUT; o++) DEMAND(fabsf(y[o]) < 1e-30f, "%g", y[o]);
  release_rooms();
}

static void exact_norm(const double *x, const void *weight, double *y, int64_t width, double eps, int half) {
  double squares = 0;
  for (int64_t i = 0; i < width; i++) squares += x[i] * x[i];
  for (int64_t i = 0; i < width; i++) y[i] = x[i] / sqrt(squares / width + eps) * get(weight, i, half);
}

static void check_norm(int64_t width, int64_t n, int half) {
  void *x = numbers(n * width, half, 3), *weight = numbers(width, half, 1);
  void *y = room(n * width * size_of(half)), *again = room(n * width * size_of(half));
  double *row = room(width * 8), *exact = room(width * 8);
  DEMAND(rms_norm(x, weight, y, n, width, 1e-5f, half, 1) == DONE, "width %d", (int)width);
  for (int t = 1; t < THREAD_COUNTS; t++) {
    rms_norm(x, weight, again, n, width, 1e-5f, half, THREADS[t]);
    DEMAND(equal(y, again, n * width, half), "width %d", (int)width);
  }
  for (int64_t r = 0; r < n; r++) {
    rms_norm(row_at(x, r * width, half), weight, again, 1, width, 1e-5f, half, 1);
    DEMAND(equal(row_at(y, r * width, half), again, width, half), "width %d row %d", (int)width, (int)r);
    for (int64_t i = 0; i < width; i++) row[i] = get(x, r * width + i, half);
    exact_norm(row, weight, exact, width, 1e-5, half);
    for (int64_t i = 0; i < width; i++) {
      double error = fabs(get(y, r * width + i, half) - exact[i]);
      DEMAND(error <= fabs(exact[i]) * (half ? 0x1p-7 : width * 0x1p-22), "width %d: %g", (int)width, error);
    }
  }
  add_to_digest(y, n * width * size_of(half));
  release_rooms();
}

// --- Attention --------------------------------------------------------------------------------------

typedef struct { int64_t texts, heads, kv, n, columns, free, d, dv; float cap; int sinks; } Shape;

// The output [dv] of a head of a node. a: as `attention` takes it, of one text.
static void exact_attention(const Attention *a, int64_t b, int64_t node, int64_t head, double *out) {
  int64_t group = head / (a->heads / a->kv);
  double sum = a->sinks ? exp(get(a->sinks, head, a->half)) : 0;
  memset(out, 0, a->dv * 8);
  for (int64_t t = 0; t < a->columns; t++) {
    double score = 0;
    for (int64_t i = 0; i < a->d; i++)
      score += (double)get(a->q, b * a->qb + head * a->qh + node * a->qn + i, a->half) *
               get(a->k, b * a->kb + group * a->kh + t * a->kt + i, a->half);
    score *= a->scale;
    if (a->cap) score = a->cap * tanh(score / a->cap);
    if (t >= a->free) score += get(a->mask, b * a->mb + node * a->mn + t - a->free, a->half);
    double weight = exp(score);
    sum += weight;
    for (int64_t i = 0; i < a->dv; i++) out[i] += weight * get(a->v, b * a->vb + group * a->vh + t * a->vt + i, a->half);
  }
  for (int64_t i = 0; i < a->dv; i++) out[i] /= sum;
}

static void *random_mask(int64_t rows, int64_t width, int free, int half) {  // each row sees its first column, or free ones
  void *mask = room(MAX(rows * width, 1) * size_of(half));
  for (int64_t i = 0; i < rows * width; i++) put(mask, i, draw() % 2 && (free || i % width) ? -FLT_MAX : 0, half);
  return mask;
}

static void *causal_mask(int64_t texts, int64_t n, int half) {  // a node sees the nodes of its text up to itself
  void *mask = zeros(texts * n * n, half);
  for (int64_t i = 0; i < texts * n; i++)
    for (int64_t j = i % n + 1; j < n; j++) put(mask, i * n + j, -FLT_MAX, half);
  return mask;
}

static void check_attention(Shape s, int causal, int half) {
  int64_t own = s.columns - s.free, row = s.heads * s.dv, count = s.texts * s.n * row;
  void *mask = causal ? causal_mask(s.texts, s.n, half) : random_mask(s.texts * s.n, own, s.free > 0, half);
  Attention a = {
    .q = numbers(s.texts * s.n * s.heads * s.d, half, 2), .k = numbers(s.texts * s.kv * s.columns * s.d, half, 1),
    .v = numbers(s.texts * s.kv * s.columns * s.dv, half, 1), .mask = mask,
    .out = room(count * size_of(half)), .sinks = s.sinks ? numbers(s.heads, half, 2) : NULL,
    .texts = s.texts, .heads = s.heads, .kv = s.kv, .n = s.n, .columns = s.columns, .free = s.free, .d = s.d, .dv = s.dv,
    .qb = s.n * s.heads * s.d, .qh = s.d, .qn = s.heads * s.d, .kb = s.kv * s.columns * s.d, .kh = s.columns * s.d,
    .kt = s.d, .vb = s.kv * s.columns * s.dv, .vh = s.columns * s.dv, .vt = s.dv, .mb = s.n * own, .mn = own,
    .scale = 0.25f, .cap = s.cap, .half = half, .threads = 1,
  };
  DEMAND(attention(&a) == DONE, "columns %d", (int)s.columns);
  Attention other = a;
  other.out = room(count * size_of(half));
  for (int t = 1; t < THREAD_COUNTS; t++) {
    other.threads = THREADS[t];
    DEMAND(attention(&other) == DONE && equal(a.out, other.out, count, half), "columns %d", (int)s.columns);
  }
  other.out = room(row * size_of(half)), other.texts = other.n = 1;
  double *exact = room(s.dv * 8);
  for (int64_t b = 0; b < s.texts; b++)
    for (int64_t i = 0; i < s.n; i++) {
      void *out = row_at(a.out, (b * s.n + i) * row, half);
      other.q = row_at(a.q, b * a.qb + i * a.qn, half), other.mask = row_at(a.mask, b * a.mb + i * a.mn, half);
      other.k = row_at(a.k, b * a.kb, half), other.v = row_at(a.v, b * a.vb, half);
      DEMAND(attention(&other) == DONE && equal(out, other.out, row, half), "columns %d node %d", (int)s.columns, (int)i);
      for (int64_t head = 0; head < s.heads; head++) {
        exact_attention(&a, b, i, head, exact);
        for (int64_t c = 0; c < s.dv; c++) {
          double error = fabs(get(out, head * s.dv + c, half) - exact[c]);
          DEMAND(error <= (half ? 0x1p-8 : 4e-6), "columns %d d %d: %g", (int)s.columns, (int)s.d, error);
        }
      }
    }
  add_to_digest(a.out, count * size_of(half));
  release_rooms();
}

// --- Layers -----------------------------------------------------------------------------------------

enum { HEADS = 4, KV = 2, TURNED = 8, NODES = 5, BEFORE = 21, FIRST = 3 };
static int64_t hidden = 40, inner = 52;  // in eight bits they are multiples of 32
enum { COLUMNS = BEFORE + NODES, CAPACITY = COLUMNS + 2, MOST_D = 16 };

typedef struct {  // what `layers` takes, and weights that are not packed
  Layer a;
  Cache c;
  Forward f;
  const void *weights[PRODUCTS];
} RawLayer;

static int run(const RawLayer *raw) { return layers(&raw->a, &raw->c, 1, &raw->f); }

enum { MIXED = Q4_1 + 1 };  // products of a layer in all forms of blocks

// A causal chain of NODES nodes in each of two texts; d: of a head.
static RawLayer random_layer(int64_t d, int form, int half) {
  int64_t outs[PRODUCTS] = {HEADS * d, KV * d, KV * d, hidden, inner, inner, hidden}, widths[NORMS] = {hidden, hidden, d, d};
  int64_t ins[PRODUCTS] = {hidden, hidden, hidden, HEADS * d, hidden, hidden, inner};
  RawLayer raw = {
    .a = {.in = hidden, .hidden = hidden, .heads = HEADS, .kv = KV, .d = d, .inner = inner, .scale = 0.3f, .eps = 1e-5f,
          .sign = -1, .half = half},
    .c = {.columns = COLUMNS, .capacity = CAPACITY, .first = FIRST},
    .f = {.texts = 2, .n = NODES, .turned = TURNED, .masked = NODES, .ab = NODES * TURNED, .an = TURNED, .mn = NODES,
          .threads = 1},
  };
  Layer *a = &raw.a;
  Forward *f = &raw.f;
  for (int i = 0; i < PRODUCTS; i++) {
    a->forms[i] = form == MIXED ? Q8_0 + i % 3 : form;
    raw.weights[i] = weights(ins[i] * outs[i], a->forms[i], 0.3f);
    a->weights[i] = packed_of(raw.weights[i], ins[i], outs[i], a->forms[i]);
    a->biases[i] = i % 2 ? numbers(outs[i], half, 0.3f) : NULL;
  }
  for (int i = 0; i < NORMS; i++) a->norms[i] = numbers(widths[i], half, 1);
  f->x = numbers(2 * NODES * hidden, half, 1), f->residual = numbers(2 * NODES * hidden, half, 1);
  f->cos = numbers(2 * NODES * TURNED, half, 1), f->sin = numbers(2 * NODES * TURNED, half, 1);
  raw.c.keys = numbers(2 * KV * CAPACITY * d, half, 1), raw.c.values = numbers(2 * KV * CAPACITY * d, half, 1);
  f->y = zeros(2 * NODES * hidden, half);
  void *mask = zeros(NODES * NODES, half);
  for (int i = 0; i < NODES; i++)
    for (int j = i + 1; j < NODES; j++) put(mask, i * NODES + j, -FLT_MAX, half);
  f->mask = mask;
  return raw;
}

static void exact_product(const RawLayer *raw, int i, const double *x, double *y, int64_t in, int64_t out) {
  const Layer *a = &raw->a;
  for (int64_t o = 0; o < out; o++) {
    y[o] = a->biases[i] ? get(a->biases[i], o, a->half) : 0;
    for (int64_t c = 0; c < in; c++) y[o] += x[c] * exact_weight(raw->weights[i], o * in + c, a->forms[i]);
  }
}

static void turn_exactly(const RawLayer *raw, double *x, int64_t at) {
  const Layer *a = &raw->a;
  const Forward *f = &raw->f;
  double y[TURNED];
  for (int i = 0; i < TURNED; i++) {
    double other = i < TURNED / 2 ? a->sign * x[i + TURNED / 2] : x[i - TURNED / 2];
    y[i] = x[i] * get(f->cos, at + i, a->half) + other * get(f->sin, at + i, a->half);
  }
  memcpy(x, y, sizeof y);
}

// The outputs y [NODES, hidden] of text b, node by node. before: keys and values [2, KV, CAPACITY, d] of the columns before.
static void exact_layer(const RawLayer *raw, int64_t b, const void *const *before, double *y) {
  const Layer *a = &raw->a;
  int64_t d = a->d;
  double cache[2][KV][COLUMNS][MOST_D], x[hidden], normed[hidden], q[HEADS * MOST_D], new[2][KV * MOST_D];
  double attended[HEADS * MOST_D], h[hidden], gate[inner], up[inner];
  for (int of = 0; of < 2; of++)
    for (int g = 0; g < KV; g++)
      for (int t = 0; t < BEFORE; t++)
        for (int64_t i = 0; i < d; i++) cache[of][g][t][i] = get(before[of], ((b * KV + g) * CAPACITY + t) * d + i, a->half);
  for (int64_t node = 0; node < NODES; node++, y += hidden) {
    int64_t r = b * NODES + node, column = BEFORE + node;
    for (int i = 0; i < hidden; i++) x[i] = get(raw->f.x, r * hidden + i, a->half);
    exact_norm(x, a->norms[BEFORE_ATTENTION], normed, hidden, a->eps, a->half);
    exact_product(raw, QUERY, normed, q, hidden, HEADS * d);
    for (int of = 0; of < 2; of++) exact_product(raw, KEY + of, normed, new[of], hidden, KV * d);
    for (int head = 0; head < HEADS; head++) {
      exact_norm(q + head * d, a->norms[OF_QUERIES], q + head * d, d, a->eps, a->half);
      turn_exactly(raw, q + head * d, r * TURNED);
    }
    for (int g = 0; g < KV; g++) {
      exact_norm(new[0] + g * d, a->norms[OF_KEYS], new[0] + g * d, d, a->eps, a->half);
      turn_exactly(raw, new[0] + g * d, r * TURNED);
      for (int of = 0; of < 2; of++) memcpy(cache[of][g][column], new[of] + g * d, d * 8);
    }
    memset(attended, 0, sizeof attended);
    for (int head = 0; head < HEADS; head++) {
      double sum = 0, *out = attended + head * d;
      for (int64_t t = FIRST; t <= column; t++) {
        double score = 0;
        for (int64_t i = 0; i < d; i++) score += q[head * d + i] * cache[0][head / (HEADS / KV)][t][i];
        sum += exp(score * a->scale);
        for (int64_t i = 0; i < d; i++) out[i] += exp(score * a->scale) * cache[1][head / (HEADS / KV)][t][i];
      }
      for (int64_t i = 0; i < d; i++) out[i] /= sum;
    }
    exact_product(raw, OUTPUT, attended, h, HEADS * d, hidden);
    for (int i = 0; i < hidden; i++) h[i] += get(raw->f.residual, r * hidden + i, a->half);
    exact_norm(h, a->norms[BEFORE_MLP], normed, hidden, a->eps, a->half);
    exact_product(raw, GATE, normed, gate, hidden, inner);
    exact_product(raw, UP, normed, up, hidden, inner);
    for (int i = 0; i < inner; i++) gate[i] = gate[i] / (1 + exp(-gate[i])) * up[i];
    exact_product(raw, DOWN, gate, y, inner, hidden);
    for (int i = 0; i < hidden; i++) y[i] += h[i];
  }
}

// Text b node by node, each in a forward of its own: its rows of y and its columns of the cache are those of `raw`.
static void check_nodes_alone(const RawLayer *raw, const void *const *before, int64_t b, int64_t nodes, const void *y) {
  int64_t d = raw->a.d, text = KV * CAPACITY * d;
  int half = raw->a.half;
  void *nothing = zeros(1, half), *cache[2];
  for (int of = 0; of < 2; of++) cache[of] = copy_of(row_at(before[of], b * text, half), text, half);
  RawLayer one = *raw;
  Forward *f = &one.f;
  f->texts = f->n = f->masked = 1, f->starts = NULL, f->mask = nothing, f->mb = f->mn = 0;
  one.c.keys = cache[0], one.c.values = cache[1], f->y = room(hidden * size_of(half));
  for (int64_t i = 0; i < nodes; i++) {
    int64_t row = (b * NODES + i) * hidden, angle = (b * NODES + i) * TURNED;
    f->x = row_at(raw->f.x, row, half), f->residual = row_at(raw->f.residual, row, half);
    f->cos = row_at(raw->f.cos, angle, half), f->sin = row_at(raw->f.sin, angle, half);
    one.c.columns = BEFORE + i + 1;
    DEMAND(run(&one) == DONE && equal(f->y, row_at(y, i * hidden, half), hidden, half), "node %d", (int)i);
  }
  for (int g = 0; g < KV; g++) {
    int64_t first = g * CAPACITY * d, count = (BEFORE + nodes) * d;
    DEMAND(equal(row_at(cache[0], first, half), row_at(raw->c.keys, b * text + first, half), count, half), "keys");
    DEMAND(equal(row_at(cache[1], first, half), row_at(raw->c.values, b * text + first, half), count, half), "values");
  }
}

static void check_layers(int64_t d, int form, int half) {
  RawLayer raw = random_layer(d, form, half);
  int64_t cached = 2 * KV * CAPACITY * d;
  const void *before[2] = {copy_of(raw.c.keys, cached, half), copy_of(raw.c.values, cached, half)};

  // 1. Two texts, against float64, against each node alone, with any number of threads.
  DEMAND(run(&raw) == DONE, "d %d", (int)d);
  void *y = copy_of(raw.f.y, 2 * NODES * hidden, half);
  double exact[NODES * hidden], bound = form >= Q8_0 ? 0.3 : half ? 0.1 : 2e-5;
  for (int64_t b = 0; b < 2; b++) {
    exact_layer(&raw, b, before, exact);
    check_nodes_alone(&raw, before, b, NODES, row_at(y, b * NODES * hidden, half));
    for (int64_t i = 0; i < NODES * hidden; i++) {
      double error = fabs(get(y, b * NODES * hidden + i, half) - exact[i]);
      DEMAND(error <= bound * (1 + fabs(exact[i])), "d %d form %d: %g of %g", (int)d, form, error, exact[i]);
    }
  }
  for (int t = 1; t < THREAD_COUNTS; t++) {
    raw.f.threads = THREADS[t];
    DEMAND(run(&raw) == DONE && equal(y, raw.f.y, 2 * NODES * hidden, half), "d %d", (int)d);
  }
  add_to_digest(y, 2 * NODES * hidden * size_of(half));
  add_to_digest(raw.c.keys, cached * size_of(half));

  // 2. Two layers in a row, the second upon the first's output, are one after the other.
  Layer two[2] = {raw.a, raw.a};
  Cache caches[2] = {raw.c, raw.c};
  DEMAND(layers(two, caches, 2, &raw.f) == DONE, "d %d", (int)d);
  void *both = copy_of(raw.f.y, 2 * NODES * hidden, half);
  RawLayer second = raw;
  second.f.x = second.f.residual = second.f.y;
  run(&raw), run(&second);
  DEMAND(equal(both, raw.f.y, 2 * NODES * hidden, half), "d %d", (int)d);

  // 3. Text 0 with two nodes, text 1 with all: rows of x, residual and y lie dense.
  int64_t starts[3] = {0, 2, 2 + NODES}, row = hidden * size_of(half);
  RawLayer dense = raw;
  void *x[2] = {room(starts[2] * row), room(starts[2] * row)};
  for (int of = 0; of < 2; of++) {
    const void *from = of ? raw.f.residual : raw.f.x;
    memcpy(x[of], from, 2 * row);
    memcpy((char *)x[of] + 2 * row, (const char *)from + NODES * row, NODES * row);
  }
  dense.f.x = x[0], dense.f.residual = x[1], dense.f.starts = starts, dense.f.y = room(starts[2] * row);
  dense.c.keys = copy_of(before[0], cached, half), dense.c.values = copy_of(before[1], cached, half);
  DEMAND(run(&dense) == DONE, "d %d", (int)d);
  DEMAND(equal(dense.f.y, y, 2 * hidden, half), "d %d", (int)d);
  DEMAND(equal(row_at(dense.f.y, 2 * hidden, half), row_at(y, NODES * hidden, half), NODES * hidden, half), "d %d", (int)d);
  release_rooms();
}

// A head's step has the bits of its parts: pairs of rows, a product or norms, a layer, a product. own: the last draft
// tokens of each text are its own, with a product for each.
enum { EAGLE, EAGLE3, ADDS_NORMED, GIVES_NORMED, HEAD_KINDS };  // the last two: EAGLE-3, and a field of `HeadStep`

static void check_head_step(int kind, int form, int half, int64_t own) {
  enum { VOCABULARY = 30, DRAFTED = 17, ROWS_ = 2 + NODES, POSITIONS = 50, FEATURES = 4 };
  int64_t all_drafted = DRAFTED + own;
  int64_t row = hidden * size_of(half), cached = 2 * KV * CAPACITY * MOST_D;
  RawLayer raw = random_layer(MOST_D, form, half);
  raw.a.norms[BEFORE_ATTENTION] = NULL, raw.c.first = 0;
  void *input = kind == EAGLE ? packed_of(weights(2 * hidden * hidden, form, 0.3f), 2 * hidden, hidden, form) : NULL;
  void *output = packed_of(weights(hidden * DRAFTED, form, 0.3f), hidden, DRAFTED, form);
  void *embedding = form < Q8_0 ? numbers(VOCABULARY * hidden, half, 1)
                                : packed_of(weights(hidden * VOCABULARY, form, 1), hidden, VOCABULARY, form);
  HeadStep step = {raw.a, {input, NULL, 2 * hidden, hidden, form, half, 0, 0},
                   {output, numbers(DRAFTED, half, 1), hidden, DRAFTED, form, half, 0, 0},
                   {embedding, NULL, hidden, VOCABULARY, form, half, 0, 0},
                   .adds_normed = kind == ADDS_NORMED, .gives_normed = kind == GIVES_NORMED};
  for (int i = QUERY; i <= VALUE && kind != EAGLE; i++) {  // they read pairs
    step.layer.in = 2 * hidden;
    int64_t outs = (i == QUERY ? HEADS : KV) * MOST_D;
    step.layer.weights[i] = packed_of(weights(2 * hidden * outs, form, 0.3f), 2 * hidden, outs, form);
  }
  for (int i = 0; i < HEAD_NORMS && kind != EAGLE; i++) step.norms[i] = numbers(hidden, half, 1);
  raw.a = step.layer;
  int64_t tokens[ROWS_], parents[ROWS_], positions[ROWS_], starts[3] = {0, 2, ROWS_}, drafted[3] = {6, 0, 2};
  int64_t vocabulary[DRAFTED], own_vocabulary[2 * own + 1];
  if (own) drafted[0] = 0, drafted[1] = 2, drafted[2] = 6;
  for (int i = 0; i < ROWS_; i++) {
    tokens[i] = draw() % all_drafted, parents[i] = draw() % FEATURES, positions[i] = draw() % POSITIONS;
  }
  for (int i = 0; i < DRAFTED; i++) vocabulary[i] = draw() % VOCABULARY;
  for (int i = 0; i < 2 * own; i++) own_vocabulary[i] = draw() % VOCABULARY;
  Linear products[2];
  for (int b = 0; b < 2 && own; b++) {
    void *rows = packed_of(weights(hidden * own, form, 0.3f), hidden, own, form);
    products[b] = (Linear){rows, b ? numbers(own, half, 1) : NULL, hidden, own, form, half, 0, 0};
  }
  void *cache[2] = {copy_of(raw.c.keys, cached, half), copy_of(raw.c.values, cached, half)};
  HeadNodes nodes = {
    .tokens = tokens, .parents = parents, .positions = positions, .starts = starts, .drafted = drafted,
    .vocabulary = vocabulary, .features = numbers(FEATURES * hidden, half, 1), .cos = numbers(POSITIONS * TURNED, half, 1),
    .sin = numbers(POSITIONS * TURNED, half, 1), .keys = cache[0], .values = cache[1],
    .states = room(ROWS_ * row), .last = room(3 * row), .logits = room(3 * all_drafted * size_of(half)),
    .texts = 2, .n = NODES, .rows = 3, .turned = TURNED, .columns = COLUMNS, .capacity = CAPACITY, .free = BEFORE, .threads = 3,
    .own = own ? products : NULL, .own_tokens = own_vocabulary,
  };
  void *mask = room(2 * NODES * NODES * size_of(half));  // one for each text
  memcpy(mask, raw.f.mask, NODES * NODES * size_of(half));
  memcpy(row_at(mask, NODES * NODES, half), raw.f.mask, NODES * NODES * size_of(half));
  nodes.mask = mask;
  DEMAND(head_step(&step, &nodes) == DONE, "kind %d form %d", kind, form);

  void *pairs = room(2 * ROWS_ * row), *x = room(ROWS_ * row), *last = room(3 * row), *read = room(3 * row);
  void *cos = zeros(2 * NODES * TURNED, half), *sin = zeros(2 * NODES * TURNED, half);
  for (int i = 0; i < ROWS_; i++) {
    int64_t turned = TURNED * size_of(half), place = i < 2 ? i : NODES + i - 2;
    int64_t own_token = (i < 2 ? 0 : own) + tokens[i] - DRAFTED;
    int64_t token = tokens[i] < DRAFTED ? vocabulary[tokens[i]] : own_vocabulary[own_token];
    char *pair = (char *)pairs + 2 * i * row;
    if (form < Q8_0) memcpy(pair, (const char *)embedding + token * row, row);
    else DEMAND(read_outputs(embedding, &token, pair, 1, hidden, VOCABULARY, form, half, 3) == DONE, "form %d", form);
    memcpy((char *)pairs + (2 * i + 1) * row, (const char *)nodes.features + parents[i] * row, row);
    if (kind != EAGLE) {
      const void *feature = row_at(nodes.features, parents[i] * hidden, half);
      memcpy((char *)x + i * row, feature, row);
      for (int of = OF_EMBEDDINGS; of <= OF_FEATURES; of++) {
        char *part = (char *)pairs + (2 * i + of) * row;
        rms_norm(part, step.norms[of], part, 1, hidden, raw.a.eps, half, 1);
        if (of == OF_FEATURES && kind == ADDS_NORMED) memcpy((char *)x + i * row, part, row);
      }
    }
    memcpy((char *)cos + place * turned, (const char *)nodes.cos + positions[i] * turned, turned);
    memcpy((char *)sin + place * turned, (const char *)nodes.sin + positions[i] * turned, turned);
  }
  step.input.threads = step.output.threads = 1;
  if (kind == EAGLE) linear(&step.input, pairs, x, ROWS_);
  Forward *f = &raw.f;
  f->x = kind == EAGLE ? x : pairs, f->residual = x, f->cos = cos, f->sin = sin, f->starts = starts, f->y = room(ROWS_ * row);
  run(&raw);
  if (kind == GIVES_NORMED) rms_norm(f->y, step.norms[OF_STATES], f->y, ROWS_, hidden, raw.a.eps, half, 1);
  DEMAND(equal(f->y, nodes.states, ROWS_ * hidden, half), "kind %d form %d", kind, form);
  for (int i = 0; i < 3; i++) memcpy((char *)last + i * row, (char *)f->y + drafted[i] * row, row);
  DEMAND(equal(last, nodes.last, 3 * hidden, half), "kind %d form %d", kind, form);
  void *logits = room(3 * DRAFTED * size_of(half));
  memcpy(read, last, 3 * row);
  if (kind == EAGLE3 || kind == ADDS_NORMED) rms_norm(last, step.norms[OF_STATES], read, 3, hidden, raw.a.eps, half, 1);
  linear(&step.output, read, logits, 3);
  for (int i = 0; i < 3; i++) {
    const void *found = row_at(nodes.logits, i * all_drafted, half);
    DEMAND(equal(row_at(logits, i * DRAFTED, half), found, DRAFTED, half), "kind %d form %d", kind, form);
    if (!own) continue;
    void *own_logits = room(own * size_of(half));
    products[drafted[i] >= 2].threads = 1;
    linear(&products[drafted[i] >= 2], (char *)read + i * row, own_logits, 1);
    DEMAND(equal(own_logits, row_at(found, DRAFTED, half), own, half), "kind %d form %d", kind, form);
  }
  add_to_digest(logits, 3 * DRAFTED * size_of(half));

  int fails = 0;  // each of its allocations
  for (countdown = 0; head_step(&step, &nodes) == NO_MEMORY; countdown = ++fails) { }
  DEMAND(fails >= 2 && fails < (own ? 11 : 9), "%d", fails);
  countdown = -1;
  release_rooms();
}

static void check_failed_allocations(void) {
  Linear a = {packed_of(weights(40 * 20, PAIRED, 1), 40, 20, PAIRED), NULL, 40, 20, PAIRED, 1, 3, 0};
  RawLayer raw = random_layer(MOST_D, SINGLE, 0);
  Attention none = {.texts = 1, .heads = 1, .kv = 1, .n = 1, .columns = 1, .free = 1, .d = 1, .dv = 1, .threads = 3};
  void *x = numbers(3 * 40, 1, 1), *y = room(3 * 20 * 2);
  countdown = 0;
  DEMAND(linear(&a, x, y, 3) == NO_MEMORY, "linear");
  countdown = 0;
  DEMAND(run(&raw) == NO_MEMORY, "layers");
  countdown = 0;
  DEMAND(attention(&none) == NO_MEMORY, "attention");
  countdown = -1;
  DEMAND(linear(&a, NULL, NULL, 0) == DONE, "no rows");
  raw.f.texts = 0;
  DEMAND(run(&raw) == DONE, "no texts");
  release_rooms();
}

// --- Tokens -----------------------------------------------------------------------------------------

static void check_noise(int64_t rows, int64_t size) {
  int64_t *starts = room(rows * 8), *tokens = room(size * 8);
  float *y = room(rows * size * 4), *again = room(rows * size * 4);
  for (int64_t r = 0; r < rows; r++) starts[r] = draw();
  for (int64_t i = 0; i < size; i++) tokens[i] = draw() % size;
  DEMAND(noise(starts, NULL, y, rows, size, 1) == DONE, "size %d", (int)size);
  for (int t = 1; t < THREAD_COUNTS; t++) {
    noise(starts, NULL, again, rows, size, THREADS[t]);
    DEMAND(equal(y, again, rows * size, 0), "size %d", (int)size);
  }
  noise(starts, tokens, again, rows, size, 1);
  for (int64_t i = 0; i < rows * size; i++)
    DEMAND(again[i] == y[i / size * size + tokens[i % size]], "size %d token %d", (int)size, (int)i);
  for (int64_t r = 0; r < rows; r++) {
    noise(starts + r, NULL, again, 1, size, 1);
    DEMAND(equal(y + r * size, again, size, 0), "size %d row %d", (int)size, (int)r);
    uint64_t kept = state;
    state = starts[r];
    for (int64_t i = 0; i < size; i++) {
      double exact = -log(-log(((draw() >> 11) + 0.5) * 0x1p-53)), error = fabs(y[r * size + i] - exact);
      DEMAND(error <= 1e-6 * (1 + fabs(exact)), "size %d: %g", (int)size, error);
    }
    state = kept;
  }
  add_to_digest(y, rows * size * 4);
  release_rooms();
}

static void check_rank(int64_t rows, int64_t size, int64_t k, int half) {
  void *logits = numbers(rows * size, half, 4);
  for (int64_t i = 0; i < size; i += 3) put(logits, i, 1, half);  // equal ones
  float *best = room(rows * k * 4), *again = room(rows * k * 4);
  int64_t *tokens = room(rows * k * 8), *tokens_again = room(rows * k * 8);
  DEMAND(rank(logits, best, tokens, rows, size, k, 2, half, 1) == DONE, "size %d", (int)size);
  for (int t = 1; t < THREAD_COUNTS; t++) {
    rank(logits, again, tokens_again, rows, size, k, 2, half, THREADS[t]);
    DEMAND(equal(best, again, rows * k, 0) && !memcmp(tokens, tokens_again, rows * k * 8), "size %d", (int)size);
  }
  for (int64_t r = 0; r < rows; r++) {
    rank(row_at(logits, r * size, half), again, tokens_again, 1, size, k, 2, half, 1);
    DEMAND(equal(best + r * k, again, k, 0) && !memcmp(tokens + r * k, tokens_again, k * 8), "size %d", (int)size);
    double sum = 0;
    for (int64_t i = 0; i < size; i++) sum += exp(2 * get(logits, r * size + i, half));
    for (int64_t j = 0; j < k; j++) {
      int64_t token = tokens[r * k + j], before = 0;
      float x = get(logits, r * size + token, half);
      for (int64_t i = 0; i < size; i++) {
        float other = get(logits, r * size + i, half);
        before += other > x || (other == x && i < token);
      }
      DEMAND(before == j, "size %d place %d: %d", (int)size, (int)j, (int)before);
      double exact = exp(2.0 * x) / sum, error = fabs(best[r * k + j] - exact);
      DEMAND(error <= exact * (4e-6 + size * 0x1p-23), "size %d: %g of %g", (int)size, error, exact);
    }
  }
  add_to_digest(best, rows * k * 4);
  add_to_digest(tokens, rows * k * 8);
  release_rooms();
}

// spread: of the logits. The smaller it is, the more tokens the noise may choose.
static void check_choice(int64_t size, float temperature, float spread, int noisy, int half) {
  int64_t rows = 3, token = 0;
  void *logits = numbers(rows * size, half, spread);
  float *gumbel = room(size * 4), *scores = room(rows * size * 4);
  for (int64_t r = 0; r < rows; r++) {
    const void *row = row_at(logits, r * size, half);
    int64_t start = draw();
    memset(gumbel, 0, size * 4);
    if (noisy) noise(&start, NULL, gumbel, 1, size, 1);
    float best = -INFINITY;
    for (int64_t i = 0; i < size; i++) {
      float x = get(row, i, half) / temperature + gumbel[i];
      if (x > best) best = x, token = i;
    }
    void *exact_row = copy_of(row, size, half);
    for (int t = 0; t < THREAD_COUNTS; t++)
      DEMAND(choose(exact_row, noisy ? &start : NULL, size, temperature, half, THREADS[t]) == token, "size %d", (int)size);
    put(exact_row, size - 1, NAN, half);
    DEMAND(choose(exact_row, noisy ? &start : NULL, size, temperature, half, 1) == size, "size %d", (int)size);
  }
  DEMAND(score(logits, gumbel, scores, rows, size, 0.7f, temperature, half) == DONE, "score");
  for (int64_t i = 0; i < rows * size; i++) {
    float scaled[1];
    put(scaled, 0, get(logits, i, half) * 0.7f, half);
    float exact = get(scaled, 0, half) / temperature + gumbel[i % size];
    DEMAND(scores[i] == exact, "size %d", (int)size);
  }
  add_to_digest(scores, rows * size * 4);
  release_rooms();
}

static void check_columns(void) {
  enum { COUNT = 3, ROWS_ = 2, HEADS_ = 3, PLACES_ = 7, BYTES = 10, MOVES = 4 };
  int64_t moves[MOVES][3] = {{0, 6, 1}, {1, 5, 0}, {1, 0, 4}, {0, 1, 1}}, whole = ROWS_ * HEADS_ * PLACES_ * BYTES;
  for (int t = 0; t < THREAD_COUNTS; t++) {
    char *blocks[COUNT], *exact[COUNT];
    for (int i = 0; i < COUNT; i++) {
      blocks[i] = numbers(whole / 2, 1, 1), exact[i] = copy_of(blocks[i], whole / 2, 1);
      for (int m = 0; m < 3; m++)
        for (int h = 0; h < HEADS_; h++) {
          char *columns = exact[i] + (moves[m][0] * HEADS_ + h) * PLACES_ * BYTES;
          memmove(columns + moves[m][2] * BYTES, columns + moves[m][1] * BYTES, BYTES);
        }
    }
    DEMAND(copy_columns(blocks, moves[0], COUNT, 3, HEADS_, PLACES_, BYTES, THREADS[t]) == DONE, "columns");
    for (int i = 0; i < COUNT; i++) DEMAND(!memcmp(blocks[i], exact[i], whole), "block %d", i);
  }
  release_rooms();
}

// --- Threads ----------------------------------------------------------------------------------------

// Each of many meetings comes after all threads have done their part, and loops share all their items.
static void check_meetings(int threads) {
  enum { MEETINGS = 500, ITEMS = 37 };
  int counts[ITEMS] = {0}, taken[ITEMS] = {0}, wrong = 0;
  Team team = {0};
#pragma omp parallel num_threads(threads)
  for (int m = 0; m < MEETINGS; m++) {
    for (int64_t i = first_item(ITEMS); i < end_item(ITEMS); i++) counts[i]++;
    for (int64_t i = take_next(&team); i < ITEMS; i = take_next(&team)) taken[i]++;
    meet(&team);
    for (int i = 0; i < ITEMS; i++)
      if (counts[i] != m + 1 || taken[i] != m + 1) {
#pragma omp atomic
        wrong++;
      }
    meet(&team);
  }
  DEMAND(!wrong, "%d threads: %d", threads, wrong);
}

// Kernels whose threads wait for more than a fourth of their time run on fewer threads, until a break is over.
static void check_choice_of_threads(void) {
  Choice choice = {0};
  DEMAND(choose_size(&choice, 2, 0) == 2, "nothing is known");
  for (int i = 0; i < 99; i++) note_waiting(&choice, 2, 0.01, 0.004, i * 0.01);
  DEMAND(choose_size(&choice, 2, 1) == 2, "they wait for a fifth");
  for (int i = 0; i < 3; i++) note_waiting(&choice, 2, 0.01, 0.008, 1);
  DEMAND(choose_size(&choice, 2, 1.05) == 1 && choose_size(&choice, 2, 1.11) == 2, "the first break");
  for (int i = 0; i < 3; i++) note_waiting(&choice, 2, 0.01, 0.008, 1.2);
  DEMAND(choose_size(&choice, 2, 1.35) == 1 && choose_size(&choice, 2, 1.41) == 2, "each break doubles");
  for (int i = 0; i < 3; i++) note_waiting(&choice, 2, 0.01, 0.001, 1.5);
  for (int i = 0; i < 3; i++) note_waiting(&choice, 8, 0.01, 0.04, 2);
  DEMAND(choose_size(&choice, 8, 2.05) == 6 && choose_size(&choice, 2, 2.05) == 2, "three fourths of many");
}

// --- Numbers that are none --------------------------------------------------------------------------

static void check_nan(void) {
  const uint32_t patterns[] = {0x7fc00001, 0x7fffffff, 0xffffffff, 0x7f800001, 0xffc00000};
  for (int i = 0; i < 5; i++) {
    float nan;
    uint16_t narrowed[L];
    memcpy(&nan, &patterns[i], 4);
    F e = exponential(all(nan)), y = silu(all(nan)), c = capped(all(nan), 3);
    store(narrowed, 0, all(nan), 1);
    for (int lane = 0; lane < L; lane++) {
      DEMAND(e[lane] != e[lane] && y[lane] != y[lane] && c[lane] != c[lane], "%x", patterns[i]);
      DEMAND(narrowed[lane] == 0x7fc0 && narrow(nan) == 0x7fc0, "%x: %x", patterns[i], narrowed[lane]);
    }
  }
  const uint16_t halves[] = {0x7c00, 0xfc00, 0x7c01, 0x7fff, 0x8001, 0x3c00, 0x7bff};
  for (int i = 0; i < 7; i++) {
    uint16_t row[L];
    for (int lane = 0; lane < L; lane++) row[lane] = halves[i];
    F x = from_halves(*(const H *)row);
    int sign = halves[i] >> 15 ? -1 : 1;
    if ((halves[i] & 0x7fff) > 0x7c00) DEMAND(x[L - 1] != x[L - 1], "%x", halves[i]);
    else if ((halves[i] & 0x7fff) == 0x7c00) DEMAND(x[L - 1] == sign * INFINITY, "%x", halves[i]);
    else DEMAND(x[L - 1] == exact_weight(row, 0, HALF), "%x", halves[i]);
  }
}

static void check_products_of_blocks(int form) {
  const int64_t outs[] = {1, 17, 130}, rows[] = {1, 3, 9, 20};
  for (int64_t in = 32; in < 400; in = in * 2 + 32)
    for (int o = 0; o < 3; o++)
      for (int half = 0; half < 2; half++) check_blocks(in, outs[o], rows[(in / 32 + o + half) % 4], form, half);
}

static void check_every_number_of_rows(int form) {
  for (int64_t n = 1; n < 40; n++) check_blocks(96, 40, n, form, n % 3 == 0);
}

static void check_layers_of_blocks(int form) {
  check_blocks_of_nan(form == MIXED ? Q4_0 : form);
  for (int half = 0; half < 2; half++) {
    hidden = 64, inner = 96;
    check_layers(MOST_D, form, half);
    for (int kind = EAGLE; kind < HEAD_KINDS && form != MIXED; kind++) check_head_step(kind, form, half, 0);
    hidden = 40, inner = 52;
  }
}

static void check_all_blocks(void) {
  check_products_of_blocks(Q8_0);
  DEMAND(digest == EIGHTS_BITS, "%016llx", (unsigned long long)digest);
  check_layers_of_blocks(Q8_0);

  uint64_t digest_before = digest, state_before = state;
  digest = NO_BITS;
  check_products_of_blocks(Q4_0);
  check_products_of_blocks(Q4_1);
  DEMAND(digest == FOURS_BITS, "%016llx", (unsigned long long)digest);
  for (int form = Q4_0; form <= MIXED; form++) check_layers_of_blocks(form);
  digest = digest_before, state = state_before;
}

int main(void) {
  check_all_blocks();
  const int64_t ins[] = {1, 33, 64, 200}, outs[] = {1, 17, 48, 130}, rows[] = {1, 3, 9, 20};
  for (int form = PAIRED; form <= SINGLE; form++)
    for (int half = 0; half < 2; half++) {
      for (int i = 0; i < 4; i++)
        for (int o = 0; o < 4; o++) check_linear(ins[i], outs[o], rows[(i + o + half) % 4], form, half);
      check_linear(96, 70, 40, form, half);
      check_layers(12, form, half);
      check_layers(MOST_D, form, half);
      check_head_step(EAGLE, form, half, 0);
    }
  const Shape shapes[] = {
    {1, 1, 1, 1, 1, 0, 1, 1, 0, 0},      {1, 3, 1, 1, 40, 0, 64, 64, 0, 0},  {2, 4, 2, 5, 33, 11, 16, 32, 0, 1},
    {3, 8, 2, 13, 50, 50, 32, 48, 0, 0}, {1, 4, 4, 30, 70, 7, 20, 13, 2, 1}, {2, 6, 2, 9, 130, 100, 48, 64, 3, 0},
    {1, 9, 3, 26, 90, 64, 64, 64, 0, 0},
  };
  for (int half = 0; half < 2; half++) {
    for (int i = 0; i < 7; i++) check_attention(shapes[i], 0, half);
    for (int64_t width = 1; width < 100; width = width * 2 + 3) check_norm(width, 4, half);
    check_norm(576, 40, half);
    for (int64_t size = 9; size < 300; size = size * 3 + 1)
      for (int64_t k = 1; k <= size; k = k * 2 + size / 2) check_rank(3, size, k, half);
    for (int64_t size = 1; size < 100; size = size * 2 + 1)
      for (int noisy = 0; noisy < 2; noisy++) check_choice(size, noisy ? 0.7f : 1, 4, noisy, half);
    for (float spread = 0; spread <= 16; spread += 8) check_choice(9001, 0.7f, spread, 1, half);
  }
  check_noise(3, 1);
  check_noise(2, 2500);
  check_columns();
  for (int t = 0; t < THREAD_COUNTS; t++) check_meetings(THREADS[t]);
  check_choice_of_threads();
  check_failed_allocations();
  check_nan();
  const Shape prompts[] = {  // their keys fill several strips, their rows several units; the first nodes see the fewest keys
    {1, 6, 2, 160, 160, 0, 16, 16, 0, 0}, {1, 7, 1, 70, 203, 133, 16, 20, 0, 1}, {2, 2, 2, 150, 150, 0, 12, 16, 0, 0},
  };
  for (int half = 0; half < 2; half++)
    for (int i = 0; i < 3; i++) {
      check_attention(prompts[i], 1, half);
      check_attention(prompts[i], 0, half);
    }
  const Shape long_texts[] = {  // their units are shared by threads
    {1, 9, 3, 5, 1100, 1095, 32, 64, 0, 0}, {1, 3, 1, 2, 1030, 5, 16, 20, 2, 1}, {2, 6, 1, 3, 1500, 1300, 8, 48, 0, 1},
  };
  for (int half = 0; half < 2; half++)
    for (int i = 0; i < 3; i++) check_attention(long_texts[i], 0, half);
  if (HAS_SHARED_BITS) DEMAND(digest == SHARED_BITS, "%016llx", (unsigned long long)digest);
  printf("vectors of %d, bits %016llx\n", L, (unsigned long long)digest);
  // What follows has the bits of its parts, which the digest holds.
  for (int kind = EAGLE3; kind < HEAD_KINDS; kind++)
    for (int form = PAIRED; form <= SINGLE; form++)
      for (int half = 0; half < 2; half++) check_head_step(kind, form, half, 0);
  hidden = 64, inner = 96;
  for (int form = PAIRED; form <= Q4_1; form++)
    for (int half = 0; half < 2; half++) {
      check_copied_outputs(form >= Q8_0 ? 96 : 75, form, half);
      for (int kind = EAGLE; kind < HEAD_KINDS; kind++) check_head_step(kind, form, half, 10);
    }
  for (int form = Q8_0; form <= Q4_1; form++) check_every_number_of_rows(form);
  return failures != 0;
}
