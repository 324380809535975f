// Convolutions with stride 1 of many small networks at once, each with weights of its own.
//
// `layers.py` puts constants before this when it is compiled:
//   REAL            float or double (a type)
//   C, H, W         channels, height and width of the input
//   O, KH, KW       filters and their size;  PH, PW: zeros around the input;  HO, WO: size of the output
// All tensors are dense; net n's inputs begin at x + n * x_step, so that nets may share them.

#define KERNEL extern "C" __global__ void

// Sums of products of windows with filters, for outputs of several samples and channels a thread.
//   PX pixels and OT filters a thread, S samples a block, CC channels at a time; grid (samples / S, nets, filters / OT)
//   FLIPPED: the gradient for the input of the convolution whose weights these are, with C and O, H and HO swapped
#ifdef CORRELATE
struct alignas(16) Four { REAL v[4]; };

KERNEL __launch_bounds__(T) correlate(const REAL* x, long long x_step, const REAL* w, const REAL* bias, REAL* y,
                                      long long rows) {
    constexpr int HP = H + 2 * PH, WP = W + 2 * PW, PLANE = HP * WP, TAPS = KH * KW, P = HO * WO;
    constexpr int OP = (OT + 3) / 4 * 4;
    extern __shared__ __align__(16) unsigned char memory[];
    REAL* filters = reinterpret_cast<REAL*>(memory);  // (CC * TAPS, OP)
    REAL* images = filters + CC * TAPS * OP;          // (S, CC, HP, WP)
    const int t = threadIdx.x, net = blockIdx.y, first = blockIdx.x * S, channel = blockIdx.z * OT;
    const int samples = rows - first < S ? rows - first : S;
    const REAL* own = w + (long long)net * O * C * TAPS;
    const REAL* inputs = x + net * x_step + (long long)first * C * H * W;

    int window[PX];
    REAL sum[PX][OT];
#pragma unroll
    for (int j = 0; j < PX; j++) {
        const int q = t + j * T, pixel = q % P;
        window[j] = q < S * P ? q / P * CC * PLANE + pixel / WO * WP + pixel % WO : 0;
#pragma unroll
        for (int o = 0; o < OT; o++)
            sum[j][o] = bias && channel + o < O ? bias[net * O + channel + o] : REAL(0);
    }
    for (int from = 0; from < C; from += CC) {
        if (from) __syncthreads();
        for (int i = t; i < CC * TAPS * OP; i += T) {
            const int o = channel + i % OP, c = from + i / OP / TAPS, tap = i / OP % TAPS;
#ifdef FLIPPED
            filters[i] = o < O && c < C ? own[(c * O + o) * TAPS + TAPS - 1 - tap] : REAL(0);
#else
            filters[i] = o < O && c < C ? own[(o * C + c) * TAPS + tap] : REAL(0);
#endif
        }
        for (int i = t; i < S * CC * PLANE; i += T) {
            const int row = i / WP % HP - PH, column = i % WP - PW, c = from + i / PLANE % CC, sample = i / (PLANE * CC);
            const bool inside = row >= 0 && row < H && column >= 0 && column < W && c < C && sample < samples;
            images[i] = inside ? inputs[((sample * C + c) * H + row) * W + column] : REAL(0);
        }
        __syncthreads();
        const REAL* filter = filters;
        const REAL* image = images;
        for (int c = 0; c < CC; c++, image += PLANE) {
#pragma unroll
            for (int tap = 0; tap < TAPS; tap++, filter += OP) {
                REAL value[PX];
#pragma unroll
                for (int j = 0; j < PX; j++) value[j] = image[window[j] + tap / KW * WP + tap % KW];
#pragma unroll
                for (int o = 0; o < OT; o += 4) {
                    const Four weights = *reinterpret_cast<const Four*>(filter + o);
#pragma unroll
                    for (int k = 0; k < 4 && o + k < OT; k++)
#pragma unroll
                        for (int j = 0; j < PX; j++) sum[j][o + k] += value[j] * weights.v[k];
                }
            }
        }
    }
    REAL* outputs = y + (net * rows + first) * O * P;
#pragma unroll
    for (int j = 0; j < PX; j++) {
        const int q = t + j * T;
        if (q < samples * P) {
#pragma unroll
            for (int o = 0; o < OT; o++)
                if (channel + o < O) outputs[(q / P * O + channel + o) * P + q % P] = sum[j][o];
        }
    }
}
#endif

// The gradients for weights and bias, summed over the samples of a block: out (nets, blocks, O * C * KH * KW + O).
//   A thread has OT filters, one row of the filter in one channel ("slot"; the last slot is the bias, whose input is 1),
//   and every PARTS-th row of the output. Grid (blocks, nets).
#ifdef WEIGHTS
KERNEL __launch_bounds__(T) weights(const REAL* x, long long x_step, const REAL* g, REAL* out, long long rows,
                                   long long each) {
    constexpr int HP = H + 2 * PH, SLOTS = C * KH + 1, GROUPS = (O + OT - 1) / OT, STEPS = (WO + KW - 1) / KW;
    constexpr int XP = (STEPS * KW + KW - 1) | 1, GP = (STEPS * KW) | 1;  // odd, so that rows lie in different banks
    constexpr int IMAGE = C * HP * XP, ENTRIES = O * C * KH * KW + O;
    extern __shared__ __align__(16) unsigned char memory[];
    REAL* image = reinterpret_cast<REAL*>(memory);  // (C, HP, XP)
    REAL* ones = image + IMAGE;                     // (XP)
    REAL* above = ones + XP;                        // the gradient for the output, (GROUPS * OT, HO, GP)
    constexpr int ALL = IMAGE + XP + GROUPS * OT * HO * GP;
    const int t = threadIdx.x, net = blockIdx.y;
    const int slot = t % SLOTS, group = t / SLOTS % GROUPS, part = t / (SLOTS * GROUPS);
    const long long from = blockIdx.x * each, to = from + each < rows ? from + each : rows;

    for (int i = t; i < ALL; i += T) image[i] = i >= IMAGE && i < IMAGE + XP ? REAL(1) : REAL(0);
    REAL sum[OT][KW];
#pragma unroll
    for (int o = 0; o < OT; o++)
#pragma unroll
        for (int k = 0; k < KW; k++) sum[o][k] = 0;

    for (long long sample = from; sample < to; sample++) {
        __syncthreads();
        const REAL* input = x + net * x_step + sample * C * H * W;
        for (int i = t; i < C * H * W; i += T)
            image[(i / (H * W) * HP + i / W % H + PH) * XP + i % W + PW] = input[i];
        const REAL* gradient = g + (net * rows + sample) * O * HO * WO;
        for (int i = t; i < O * HO * WO; i += T) above[i / WO * GP + i % WO] = gradient[i];
        __syncthreads();
        if (part < PARTS) {
            for (int row = part; row < HO; row += PARTS) {
                const REAL* in = slot < C * KH ? image + (slot / KH * HP + row + slot % KH) * XP : ones;
                const REAL* up = above + (group * OT * HO + row) * GP;
                REAL window[KW];
#pragma unroll
                for (int k = 0; k < KW - 1; k++) window[k] = in[k];
                for (int step = 0; step < STEPS; step++, in += KW, up += KW) {
#pragma unroll
                    for (int u = 0; u < KW; u++) {
                        window[(u + KW - 1) % KW] = in[u + KW - 1];
#pragma unroll
                        for (int o = 0; o < OT; o++) {
                            const REAL value = up[o * HO * GP + u];
#pragma unroll
                            for (int k = 0; k < KW; k++) sum[o][k] += value * window[(u + k) % KW];
                        }
                    }
                }
            }
        }
    }
    REAL* own = out + ((long long)net * gridDim.x + blockIdx.x) * ENTRIES;
    if constexpr (PARTS == 1) {
#pragma unroll
        for (int o = 0; o < OT; o++)
#pragma unroll
            for (int k = 0; k < KW; k++) {
                const int filter = group * OT + o;
                if (part > 0 || filter >= O) continue;
                if (slot < C * KH) own[(filter * C * KH + slot) * KW + k] = sum[o][k];
                else if (k == 0) own[O * C * KH * KW + filter] = sum[o][0];
            }
        return;
    }
    __syncthreads();
    REAL* parts = image;  // (PARTS, GROUPS, SLOTS, OT * KW)
    if (part < PARTS) {
#pragma unroll
        for (int o = 0; o < OT; o++)
#pragma unroll
            for (int k = 0; k < KW; k++) parts[t * OT * KW + o * KW + k] = sum[o][k];
    }
    __syncthreads();
    for (int i = t; i < ENTRIES; i += T) {
        const bool weight = i < O * C * KH * KW;
        const int o = weight ? i / (C * KH * KW) : i - O * C * KH * KW;
        const int at = weight ? i / KW % (C * KH) : C * KH, k = weight ? i % KW : 0;
        const REAL* p = parts + ((o / OT * SLOTS + at) * OT + o % OT) * KW + k;
        REAL total = 0;
        for (int j = 0; j < PARTS; j++) total += p[j * GROUPS * SLOTS * OT * KW];
        own[i] = total;
    }
}
#endif
