/* A convolution with steps of one pixel, the largest of each 2 x 2 pixels of what it says, what a ReLU leaves of it,
 * and the gradients of all three, in one thread. Images are (H, W, C), filters (O, C, K, K); a border of P pixels is 0.
 *
 * Numbers beside each other are channels, so that sums stay in registers and nothing is gathered. Of four pixels only
 * the largest has a gradient, and often none has: the passes back visit just those. */

#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16
#define REGISTERS 28 /* for sums; the rest is for what is multiplied */
#else
#define LANES 8
#define REGISTERS 12
#endif

#define TALL (H + 2 * P)
#define WIDE (W + 2 * P)
#define IMAGE (TALL * WIDE * C)
#define HALF_H ((TALL - K + 1) / 2)
#define HALF_W ((WIDE - K + 1) / 2)
#define UP(a, b) (((a) + (b) - 1) / (b))
#define UNROLL _Pragma("GCC unroll 32")

#define VECTOR(type, lanes) __attribute__((vector_size(4 * (lanes)), aligned(4), may_alias)) type
#define BEYOND LANES /* rows are read in whole vectors, so up to so many numbers behind the last one */

static void with_border(const float *image, float *padded) {
  if (P) memset(padded, 0, sizeof(float) * IMAGE);
  for (int y = 0; y < H; y++)
    memcpy(padded + ((y + P) * WIDE + P) * C, image + y * W * C, sizeof(float) * W * C);
}

/* Forward: a vector is the outputs of one pixel. */

#define OUT_LANES (O <= 8 ? 8 : LANES)
#define OUT_VECTORS UP(O, OUT_LANES)
typedef VECTOR(float, OUT_LANES) Outputs;
typedef VECTOR(int32_t, OUT_LANES) Choices;

/* Squares of pixels side by side that are summed at once: a divisor of the row, four sums each. */
#define FITS(n) (HALF_W % (n) == 0 && 4 * (n) <= REGISTERS)
#define SQUARES (FITS(7) ? 7 : FITS(6) ? 6 : FITS(5) ? 5 : FITS(4) ? 4 : FITS(3) ? 3 : FITS(2) ? 2 : 1)

#define NOWHERE 4

static void largest(const Outputs four[4], float *said, uint8_t *where, int lanes) {
  Outputs best = four[0];
  Choices choice = {0};
  UNROLL for (int q = 1; q < 4; q++) {
    Choices larger = (four[q] > best) | (four[q] != four[q]); /* the first of equals stays, and what is no number */
    best = (Outputs)((larger & (Choices)four[q]) | (~larger & (Choices)best));
    choice = (larger & q) | (~larger & choice);
  }
  Choices nothing = best <= 0; /* which what is no number is not */
  best = (Outputs)(~nothing & (Choices)best);
  choice = (nothing & NOWHERE) | (~nothing & choice);
  memcpy(said, &best, sizeof(float) * lanes);
  for (int o = 0; o < lanes; o++) where[o] = choice[o];
}

/* said and where are (count, HALF_H, HALF_W, O); where: which of a square is the largest, 0 to 3, row by row,
 * or NOWHERE, if that is not above 0. */
void forward(const float *images, const float *weight, const float *bias, float *said, uint8_t *where, long count) {
  Outputs filters[OUT_VECTORS][K * K * C], start[OUT_VECTORS];
  float padded[IMAGE];
  memset(filters, 0, sizeof filters);
  memset(start, 0, sizeof start);
  for (int o = 0; o < O; o++) {
    int block = o / OUT_LANES, lane = o % OUT_LANES;
    if (bias) start[block][lane] = bias[o];
    for (int c = 0; c < C; c++)
      for (int tap = 0; tap < K * K; tap++) filters[block][tap * C + c][lane] = weight[(o * C + c) * K * K + tap];
  }
  for (long n = 0; n < count; n++) {
    with_border(images + n * H * W * C, padded);
    for (int i = 0; i < HALF_H; i++)
      for (int block = 0; block < OUT_VECTORS; block++)
        for (int j = 0; j < HALF_W; j += SQUARES) {
          Outputs sums[SQUARES][4];
          UNROLL for (int s = 0; s < SQUARES; s++) UNROLL for (int q = 0; q < 4; q++) sums[s][q] = start[block];
          const Outputs *filter = filters[block];
          const float *row = padded + (2 * i * WIDE + 2 * j) * C;
          for (int u = 0; u < K; u++, row += WIDE * C)
            for (int v = 0; v < K * C; v++, filter++)
              UNROLL for (int s = 0; s < SQUARES; s++) UNROLL for (int q = 0; q < 4; q++)
                  sums[s][q] += *filter * row[(q / 2 * WIDE + 2 * s + q % 2) * C + v];
          int lanes = O - block * OUT_LANES < OUT_LANES ? O - block * OUT_LANES : OUT_LANES;
          UNROLL for (int s = 0; s < SQUARES; s++) {
            long at = ((n * HALF_H + i) * HALF_W + j + s) * O + block * OUT_LANES;
            largest(sums[s], said + at, where + at, lanes);
          }
        }
  }
}

/* To the filters: a vector is part of the row of a window, its pixels with their channels. Images come in groups that
 * fit in a cache, and for each filter the pixels that have a gradient are listed first. */

#define GROUP 8
#define ROW_LANES (K * C <= 8 ? 8 : LANES)
#define ROW_VECTORS UP(K * C, ROW_LANES)
typedef VECTOR(float, ROW_LANES) Row;
#define ROWS (ROW_VECTORS * K <= REGISTERS - 4 ? K : 1) /* of a window at once */

static void to_filters(const float *images, const float *above, const uint8_t *where, float *weight, float *bias,
                       long count) {
  Row sums[O][K][ROW_VECTORS];
  float padded[GROUP * IMAGE + BEYOND], given[GROUP * HALF_H * HALF_W];
  int corner[GROUP * HALF_H * HALF_W];
  memset(sums, 0, sizeof sums);
  memset(padded + GROUP * IMAGE, 0, sizeof(float) * BEYOND);
  memset(bias, 0, sizeof(float) * O);
  for (long first = 0; first < count; first += GROUP) {
    int group = count - first < GROUP ? count - first : GROUP;
    for (int n = 0; n < group; n++) with_border(images + (first + n) * H * W * C, padded + n * IMAGE);
    for (int o = 0; o < O; o++) {
      int listed = 0;
      float total = 0;
      for (int n = 0; n < group; n++)
        for (int i = 0; i < HALF_H; i++)
          for (int j = 0; j < HALF_W; j++) {
            long at = (((first + n) * HALF_H + i) * HALF_W + j) * O + o;
            int q = where[at];
            given[listed] = above[at];
            corner[listed] = n * IMAGE + ((2 * i + q / 2) * WIDE + 2 * j + q % 2) * C;
            total += q == NOWHERE ? 0 : above[at];
            listed += q != NOWHERE;
          }
      bias[o] += total;
      for (int u = 0; u < K; u += ROWS) {
        Row own[ROWS][ROW_VECTORS];
        UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int v = 0; v < ROW_VECTORS; v++) own[r][v] = sums[o][u + r][v];
        for (int k = 0; k < listed; k++) {
          const float *window = padded + corner[k] + u * WIDE * C;
          float g = given[k];
          UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int v = 0; v < ROW_VECTORS; v++)
              own[r][v] += g * *(const Row *)(window + r * WIDE * C + v * ROW_LANES);
        }
        UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int v = 0; v < ROW_VECTORS; v++) sums[o][u + r][v] = own[r][v];
      }
    }
  }
  for (int o = 0; o < O; o++)
    for (int c = 0; c < C; c++)
      for (int u = 0; u < K; u++)
        for (int v = 0; v < K; v++) weight[((o * C + c) * K + u) * K + v] = ((float *)sums[o][u])[v * C + c];
}

/* To the images: what all filters say of one square of pixels goes to the same K + 1 rows of K + 1 pixels, whichever
 * of the four was the largest: filters stand ready one pixel further along, and with an empty row above and below. */

#define PATCH_VECTORS UP((K + 1) * C, LANES)
typedef VECTOR(float, LANES) Patch;
#define PATCH_ROWS (PATCH_VECTORS * (K + 1) <= REGISTERS ? K + 1 : 1)

static void to_images(const float *weight, const float *above, const uint8_t *where, float *images, long count) {
  Patch filters[O][2][K + 2][PATCH_VECTORS];
  float padded[IMAGE + BEYOND];
  memset(filters, 0, sizeof filters);
  for (int o = 0; o < O; o++)
    for (int along = 0; along < 2; along++)
      for (int u = 0; u < K; u++)
        for (int v = 0; v < K; v++)
          for (int c = 0; c < C; c++)
            ((float *)filters[o][along][u + 1])[(v + along) * C + c] = weight[((o * C + c) * K + u) * K + v];
  for (long n = 0; n < count; n++) {
    memset(padded, 0, sizeof padded);
    for (int i = 0; i < HALF_H; i++)
      for (int j = 0; j < HALF_W; j++) {
        float given[O];
        const Patch *filter[O];
        int listed = 0;
        for (int o = 0; o < O; o++) {
          long at = ((n * HALF_H + i) * HALF_W + j) * O + o;
          int q = where[at];
          given[listed] = above[at];
          filter[listed] = filters[o][q % 2][1 - q / 2 % 2];
          listed += q != NOWHERE;
        }
        for (int u = 0; u <= K; u += PATCH_ROWS) {
          Patch sums[PATCH_ROWS][PATCH_VECTORS];
          UNROLL for (int r = 0; r < PATCH_ROWS; r++) UNROLL for (int v = 0; v < PATCH_VECTORS; v++) sums[r][v] = (Patch){0};
          for (int k = 0; k < listed; k++) {
            const Patch *row = filter[k] + u * PATCH_VECTORS;
            float g = given[k];
            UNROLL for (int r = 0; r < PATCH_ROWS; r++) UNROLL for (int v = 0; v < PATCH_VECTORS; v++)
                sums[r][v] += g * row[r * PATCH_VECTORS + v];
          }
          float *to = padded + ((2 * i + u) * WIDE + 2 * j) * C;
          UNROLL for (int r = 0; r < PATCH_ROWS; r++) UNROLL for (int v = 0; v < PATCH_VECTORS; v++)
              *(Patch *)(to + r * WIDE * C + v * LANES) += sums[r][v];
        }
      }
    for (int y = 0; y < H; y++)
      memcpy(images + (n * H + y) * W * C, padded + ((y + P) * WIDE + P) * C, sizeof(float) * W * C);
  }
}

/* above is (count, HALF_H, HALF_W, O); to_x may be null, if nobody asks for it. */
void backward(const float *images, const float *weight, const float *above, const uint8_t *where, float *to_x,
              float *to_weight, float *to_bias, long count) {
  to_filters(images, above, where, to_weight, to_bias, count);
  if (to_x) to_images(weight, above, where, to_x, count);
}
