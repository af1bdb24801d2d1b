// Products by a processor's matrix unit, AMX. `eight_bits.c` includes this file.
//
// A tile has up to 16 lines of 64 bytes, and one instruction multiplies two of them:
//
//   sums [rows, L]  +=  rows [rows, 64 bytes of inputs]  x  weights [16 lines, L outputs, 4 bytes of inputs]
//
// That is the order in which weights are packed anyway.

enum { AMX_ROWS = 16 };

static int is_amx_allowed(void) {
  static int allowed = -1;
  if (allowed < 0) allowed = !syscall(SYS_arch_prctl, 0x1023, 18);  // ARCH_REQ_XCOMP_PERM, tile data
  return allowed;
}

typedef struct { uint8_t palette, row, zeros[14]; uint16_t bytes[16]; uint8_t lines[16]; } TileShapes;

// --- In bfloat16 --------------------------------------------------------------------------------------

// Blocks [from, to) of outputs. x: [rows padded to 16 beyond the first 16, width] bfloat16.
static void multiply_by_amx(const uint16_t *x, const uint16_t *w, void *y, int64_t row, const void *bias, int64_t n,
                              int64_t width, int64_t out, int64_t from, int64_t to) {
  TileShapes shapes = {.palette = 1};
  for (int t = 0; t < 8; t++) {
    shapes.bytes[t] = 64;
    shapes.lines[t] = t < 6 ? MIN(n, AMX_ROWS) : 16;
  }
  _tile_loadconfig(&shapes);
  float sums[4][AMX_ROWS * L] __attribute__((aligned(64)));
  for (int64_t b = from; b < to; b += 2) {
    const uint16_t *w0 = w + b * L * width, *w1 = b + 1 < to ? w0 + L * width : w0;
    for (int64_t r = 0; r < n; r += 2 * AMX_ROWS) {
      const uint16_t *x0 = x + r * width, *x1 = x0 + AMX_ROWS * width;
      int both = r + AMX_ROWS < n;
      _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
      for (int64_t k = 0; k < width; k += 32) {
        for (int i = 0; i < 16 * 64; i += 64) {
          __builtin_prefetch((const char *)(w0 + k * L) + i + AHEAD);
          __builtin_prefetch((const char *)(w1 + k * L) + i + AHEAD);
        }
        _tile_loadd(6, w0 + k * L, 64);
        _tile_loadd(7, w1 + k * L, 64);
        _tile_loadd(4, x0 + k, 2 * width);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (both) {
          _tile_loadd(5, x1 + k, 2 * width);
          _tile_dpbf16ps(2, 5, 6);
          _tile_dpbf16ps(3, 5, 7);
        }
      }
      _tile_stored(0, sums[0], 64); _tile_stored(1, sums[1], 64);
      if (both) { _tile_stored(2, sums[2], 64); _tile_stored(3, sums[3], 64); }
      for (int t = 0; t < 4; t++) {
        int64_t first = r + t / 2 * AMX_ROWS;
        if (first < n && b + t % 2 < to)
          finish(sums[t], L, y, row, bias, out, 1, first, MIN(AMX_ROWS, n - first), (b + t % 2) * L, L);
      }
    }
  }
  _tile_release();
}

// --- In eight bits ------------------------------------------------------------------------------------
// Tile 0: sums of a block, 1: its rows, 2: its weights. The floats' sums of a block are formed while the tiles multiply
// the next one.

enum { FEW_AMX_ROWS = 8 };  // as many are multiplied as fast by vectors

static void shape_eights(int rows) {
  TileShapes shapes = {.palette = 1, .bytes = {4 * L, EIGHTS_BLOCK, 4 * L}, .lines = {rows, rows, EIGHTS_BLOCK / 4}};
  _tile_loadconfig(&shapes);
}

// The numbers of a block with their signs: of Q4_0 q - 8, for which no sum of 8 x remains to be subtracted.
INLINE void read_block(const char *w, I *numbers, int form) {
  UNROLL
  for (int s = 0; s < EIGHTS_BLOCK / 4; s++)
    numbers[s] = (I)((PackedFours)factors_at(w, s / 2 * 2, s % 2, form) - (uint8_t)offset_of(form));
}

INLINE void multiply_block(const char *x, int64_t row_bytes, const I *numbers) {
  __asm__ volatile("" ::: "memory");  // some compilers do not know that a tile is loaded from memory
  _tile_loadd(1, x, row_bytes);
  _tile_loadd(2, numbers, 4 * L);
  _tile_zero(0);
  _tile_dpbssd(0, 1, 2);
}

// As `eights_tile`, of one panel. A step in time, of block b:
//
//   sums of b stored  |  b + 1 multiplied  |  b + 2 read  |  sums of b added to those of floats
INLINE void eights_by_amx(const char *x, int64_t row_bytes, const char *w, const uint16_t *scales, F *sums, int64_t in,
                          int rows, int again, int form) {
  F sum[AMX_ROWS] = {};
  I parts[2][AMX_ROWS] __attribute__((aligned(64))), numbers[2][EIGHTS_BLOCK / 4] __attribute__((aligned(64)));
  int64_t blocks = in / EIGHTS_BLOCK, bytes = EIGHTS_BLOCK * L * bits_of(form) / 8;
  const char *row_scales = x + in * sizeof(RowNumber);
  for (int64_t b = 0; b < MIN(2, blocks); b++) read_block(w + b * bytes, numbers[b], form);
  multiply_block(x, row_bytes, numbers[0]);
  for (int64_t b = 0; b < blocks; b++, w += bytes) {
    I *part = parts[b % 2];
    _tile_stored(0, part, 4 * L);
    for (int line = 0; line < bytes && !again; line += 64) __builtin_prefetch(w + bytes + 2 * AHEAD + line, 0, 2);
    if (b + 1 < blocks) multiply_block(x + (b + 1) * EIGHTS_BLOCK, row_bytes, numbers[(b + 1) % 2]);
    if (b + 2 < blocks) read_block(w + 2 * bytes, numbers[b % 2], form);
    BlockScales block = read_scales(scales, b, form);
    UNROLL
    for (int r = 0; r < rows; r++) sum[r] = add_block(sum[r], part[r], block, row_scales + r * row_bytes, b, blocks, form);
  }
  UNROLL
  for (int r = 0; r < rows; r++) sums[r * EIGHTS_PANELS] = sum[r];
}

#define AMX_CASE(r) case r: \
  if (form == Q8_0) eights_by_amx(x, row_bytes, w, scales, sums, in, r, again, Q8_0); \
  else if (form == Q4_0) eights_by_amx(x, row_bytes, w, scales, sums, in, r, again, Q4_0); \
  else eights_by_amx(x, row_bytes, w, scales, sums, in, r, again, Q4_1); \
  break;
static void eights_of_rows(const char *x, int64_t row_bytes, const char *w, const uint16_t *scales, F *sums, int64_t in,
                         int rows, int again, int form) {
  switch (rows) {
    AMX_CASE(9) AMX_CASE(10) AMX_CASE(11) AMX_CASE(12)
    AMX_CASE(13) AMX_CASE(14) AMX_CASE(15) AMX_CASE(16)
  }
}
