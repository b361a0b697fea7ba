/* The functions of cuDNN that models/pytorch/cudnn_rnn.py calls, by the prototypes of cudnn_adv.h, cudnn_ops.h and cudnn_graph.h.

They work on host memory and compute nothing. Each writes its name and what it was given into a log: numbers as they are, of
float32 tensors the first number. What a pass returns is filled with numbers of its own. The weights lie in an order of this
library's own, with a gap. FAKE_CUDNN_REFUSES=3,2 in the environment: no descriptor for these algorithms. */
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, NOT_SUPPORTED = 3000, GAP = 16 };

typedef struct { int input, units, layers, algorithm, math; float rate; } rnn;
typedef struct { int dtype, layout, steps, batch, width; } data;
typedef struct { int count, sizes[3]; } tensor;
typedef struct { float rate; } dropout;

static char written[1 << 20];

static void note(const char *format, ...) {
    size_t length = strlen(written);
    va_list arguments;
    if (sizeof written - length < 1024) abort(); /* a test that never reads the log */
    va_start(arguments, format);
    vsnprintf(written + length, 1000, format, arguments);
    va_end(arguments);
    strcat(written, "\n");
}

static float first(const void *numbers) { return numbers ? *(const float *)numbers : -1; }

static void fill(void *numbers, size_t count, float value) {
    for (size_t k = 0; numbers && k < count; k++) ((float *)numbers)[k] = value;
}

const char *fake_log(void) { return written; }
void fake_clear(void) { written[0] = 0; }

size_t cudnnGetVersion(void) { return 91900; }
const char *cudnnGetErrorString(int status) {
    return status == NOT_SUPPORTED ? "CUDNN_STATUS_NOT_SUPPORTED" : "CUDNN_STATUS_BAD_PARAM";
}
void cudnnGetLastErrorString(char *message, size_t size) { snprintf(message, size, "the fake says no"); }

int cudnnCreate(void **handle) { *handle = malloc(1); note("cudnnCreate"); return SUCCESS; }
int cudnnSetStream(void *handle, void *stream) { note("cudnnSetStream"); return SUCCESS; }

#define DESCRIPTOR(kind, type) \
    int cudnnCreate##kind(void **made) { *made = calloc(1, sizeof(type)); note("create " #kind); return SUCCESS; } \
    int cudnnDestroy##kind(void *made) { free(made); note("destroy " #kind); return SUCCESS; }
DESCRIPTOR(RNNDescriptor, rnn)
DESCRIPTOR(RNNDataDescriptor, data)
DESCRIPTOR(TensorDescriptor, tensor)
DESCRIPTOR(DropoutDescriptor, dropout)

int cudnnDropoutGetStatesSize(void *handle, size_t *size) { *size = 48; return SUCCESS; }
int cudnnSetDropoutDescriptor(void *made, void *handle, float rate, void *states, size_t size, unsigned long long seed) {
    ((dropout *)made)->rate = rate;
    note("dropout %g, states of %zu bytes%s, seed %llu", rate, size, states ? "" : " nowhere", seed);
    return SUCCESS;
}

int cudnnSetRNNDescriptor_v8(void *made, int algorithm, int cell, int bias, int direction, int input_mode, int dtype,
                             int precision, int math, int32_t input, int32_t units, int32_t projection, int32_t layers,
                             void *dropped, uint32_t flags) {
    const char *refused = getenv("FAKE_CUDNN_REFUSES");
    note("rnn algorithm %d cell %d bias %d direction %d input_mode %d dtype %d precision %d math %d input %d units %d "
         "projection %d layers %d flags %u", algorithm, cell, bias, direction, input_mode, dtype, precision, math, input,
         units, projection, layers, flags);
    if (refused && strchr(refused, '0' + algorithm)) return NOT_SUPPORTED;
    *(rnn *)made = (rnn){input, units, layers, algorithm, math, ((dropout *)dropped)->rate};
    return SUCCESS;
}

int cudnnBuildRNNDynamic(void *handle, void *made, int batch) { note("build for %d", batch); return SUCCESS; }

int cudnnSetRNNDataDescriptor(void *made, int dtype, int layout, int steps, int batch, int width, const int lengths[],
                              void *fill_with) {
    *(data *)made = (data){dtype, layout, steps, batch, width};
    note("data dtype %d layout %d steps %d batch %d width %d lengths %d to %d%s", dtype, layout, steps, batch, width,
         lengths[0], lengths[batch - 1], fill_with ? " filled" : "");
    return SUCCESS;
}

int cudnnSetTensorNdDescriptor(void *made, int dtype, int count, const int sizes[], const int strides[]) {
    memcpy(((tensor *)made)->sizes, sizes, sizeof(int) * 3);
    note("tensor dtype %d [%d %d %d] strides [%d %d %d]", dtype, sizes[0], sizes[1], sizes[2], strides[0], strides[1],
         strides[2]);
    return SUCCESS;
}

int cudnnGetTensorNdDescriptor(void *made, int asked, int *dtype, int *count, int sizes[], int strides[]) {
    *dtype = 0, *count = 3;
    memcpy(sizes, ((tensor *)made)->sizes, sizeof(int) * 3);
    return SUCCESS;
}

static size_t of_layer(const rnn *r, int layer) {
    size_t width = layer ? r->units : r->input;
    return 4 * r->units * (width + r->units + 2) + GAP;
}

int cudnnGetRNNWeightSpaceSize(void *handle, void *made, size_t *size) {
    rnn *r = made;
    *size = 0;
    for (int layer = 0; layer < r->layers; layer++) *size += 4 * of_layer(r, layer);
    return SUCCESS;
}

/* The last layer first; in each the biases, the gap, the matrices. */
int cudnnGetRNNWeightParams(void *handle, void *made, int32_t layer, size_t size, const void *space, int32_t which,
                            void *matrix_desc, void **matrix, void *bias_desc, void **bias) {
    rnn *r = made;
    size_t at = 0, width = layer ? r->units : r->input;
    for (int above = r->layers - 1; above > layer; above--) at += of_layer(r, above);
    const float *start = (const float *)space + at, *matrices = start + 8 * r->units + GAP;
    *bias = (void *)(start + which * r->units);
    *matrix = (void *)(matrices + (which < 4 ? which * r->units * width : 4 * r->units * width + (which - 4) * r->units * r->units));
    *(tensor *)matrix_desc = (tensor){3, {1, r->units, which < 4 ? width : r->units}};
    *(tensor *)bias_desc = (tensor){3, {1, r->units, 1}};
    return SUCCESS;
}

int cudnnGetRNNTempSpaceSizes(void *handle, void *made, int mode, void *x, size_t *work, size_t *reserve) {
    *work = 64 + mode, *reserve = mode ? 128 : 0;
    return SUCCESS;
}

int cudnnRNNForward(void *handle, void *made, int mode, const int32_t lengths[], void *x_desc, const void *x, void *y_desc,
                    void *y, void *h_desc, const void *hx, void *hy, void *c_desc, const void *cx, void *cy,
                    size_t weight_size, const void *weights, size_t work_size, void *work, size_t reserve_size,
                    void *reserve) {
    rnn *r = made;
    data *out = y_desc;
    size_t states = (size_t)r->layers * out->batch * r->units;
    note("forward mode %d length %d x %g of width %d hx %g cx %g weights %g of %zu work %zu reserve %zu rate %g", mode,
         lengths[0], first(x), ((data *)x_desc)->width, first(hx), first(cx), first(weights), weight_size, work_size,
         reserve_size, r->rate);
    /* A test can have all algorithms but the standard one wrong; TENSOR_OP_MATH_ALLOW_CONVERSION rounds to float16. */
    float value = getenv("FAKE_CUDNN_WRONG") && r->algorithm ? 7 : r->math == 2 ? 1 : 1.0001f;
    fill(y, (size_t)out->steps * out->batch * r->units, value);
    fill(hy, states, 2), fill(cy, states, 3), fill(reserve, reserve_size / 4, 4);
    return SUCCESS;
}

int cudnnRNNBackwardData_v8(void *handle, void *made, const int32_t lengths[], void *y_desc, const void *y, const void *dy,
                            void *x_desc, void *dx, void *h_desc, const void *hx, const void *dhy, void *dhx, void *c_desc,
                            const void *cx, const void *dcy, void *dcx, size_t weight_size, const void *weights,
                            size_t work_size, void *work, size_t reserve_size, void *reserve) {
    rnn *r = made;
    data *in = x_desc;
    size_t states = (size_t)r->layers * in->batch * r->units;
    note("backward data length %d y %g of width %d dy %g hx %g dhy %g cx %g dcy %g weights %g of %zu work %zu reserve %g of %zu",
         lengths[0], first(y), ((data *)y_desc)->width, first(dy), first(hx), first(dhy), first(cx), first(dcy),
         first(weights), weight_size, work_size, first(reserve), reserve_size);
    fill(dx, (size_t)in->steps * in->batch * in->width, 5), fill(dhx, states, 6), fill(dcx, states, 7);
    fill(reserve, reserve_size / 4, 8);
    return SUCCESS;
}

int cudnnRNNBackwardWeights_v8(void *handle, void *made, int mode, const int32_t lengths[], void *x_desc, const void *x,
                               void *h_desc, const void *hx, void *y_desc, const void *y, size_t weight_size,
                               void *dweights, size_t work_size, void *work, size_t reserve_size, void *reserve) {
    note("backward weights mode %d length %d x %g hx %g y %g dweights %g of %zu work %zu reserve %g of %zu", mode, lengths[0],
         first(x), first(hx), first(y), first(dweights), weight_size, work_size, first(reserve), reserve_size);
    for (size_t k = 0; k < weight_size / 4; k++) ((float *)dweights)[k] += 9;
    return SUCCESS;
}
