/* Two gradients: their inner products in float64, in one pass and with no copy of them, and one moved along the other.
 * Sums are kept in lanes, so that their order does not depend on the processor. */

#include <math.h>

#define LANES 16
typedef float Floats __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef double Doubles __attribute__((vector_size(8 * LANES)));

static double at_least(double value, double least) {
  return value < least ? least : value; /* what is no number stays so */
}

/* To results: <a, b>, <a, a>, <b, b>, whether the first is below 0, and the angle between the two in degrees. */
void related(const float *a, const float *b, double *results, long size, double tiny) {
  Doubles sums[3] = {{0}, {0}, {0}};
  long i = 0;
  for (; i + LANES <= size; i += LANES) {
    const Doubles x = __builtin_convertvector(*(const Floats *)(a + i), Doubles);
    const Doubles y = __builtin_convertvector(*(const Floats *)(b + i), Doubles);
    sums[0] += x * y;
    sums[1] += x * x;
    sums[2] += y * y;
  }
  double inner = 0, first = 0, second = 0;
  for (; i < size; i++) {
    inner += (double)a[i] * b[i];
    first += (double)a[i] * a[i];
    second += (double)b[i] * b[i];
  }
  for (int lane = 0; lane < LANES; lane++) {
    inner += sums[0][lane];
    first += sums[1][lane];
    second += sums[2][lane];
  }
  const double cosine = inner / (sqrt(at_least(first, tiny)) * sqrt(at_least(second, tiny)));
  results[0] = inner;
  results[1] = first;
  results[2] = second;
  results[3] = inner < 0;
  results[4] = acos(cosine > 1 ? 1 : at_least(cosine, -1)) * 57.29577951308232;
}

/* result = a + v b, with v = max(0, -<a, b> / <b, b>). */
void moved(const float *restrict a, const float *restrict b, const double *inner, const double *square,
           float *restrict result, long size, double tiny) {
  const double factor = at_least(-*inner, 0) / at_least(*square, tiny);
  for (long i = 0; i < size; i++) result[i] = a[i] + (float)(factor * b[i]);
}
