/* Adam, and AMSGrad where `largest` is kept, in one pass through a model. */

#include <math.h>
#include <stdint.h>

void adam(float *restrict parameters, const float *restrict gradients, float *restrict means, float *restrict squares,
          float *restrict largest, const int64_t *steps, long size, double rate, double decay, double beta1,
          double beta2, double epsilon) {
  const float step = rate / (1 - pow(beta1, *steps)), correction = sqrt(1 - pow(beta2, *steps));
  const float shrunk = decay, along = 1 - beta1, kept = beta2, added = 1 - beta2, least = epsilon;
  for (long i = 0; i < size; i++) {
    const float gradient = gradients[i] + shrunk * parameters[i];
    const float mean = means[i] + along * (gradient - means[i]);
    float square = squares[i] * kept + added * gradient * gradient;
    means[i] = mean;
    squares[i] = square;
    if (largest) {
      square = largest[i] > square || largest[i] != largest[i] ? largest[i] : square; /* what is no number stays so */
      largest[i] = square;
    }
    parameters[i] -= mean / (sqrtf(square) / correction + least) * step;
  }
}
