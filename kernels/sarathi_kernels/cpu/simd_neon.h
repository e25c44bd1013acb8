// Four floats in a register of NEON, as every ARM processor of 64 bits has it.
#pragma once

#include <arm_neon.h>

namespace sarathi {

using Part = float32x4_t;
using PartBits = uint32x4_t;
using PartInts = int32x4_t;

inline Part repeat(float x) { return vdupq_n_f32(x); }
inline Part fma(Part a, Part b, Part c) { return vfmaq_f32(c, a, b); }
inline Part max(Part a, Part b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }  // the second if one is NaN
inline Part min(Part a, Part b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
inline Part nearest(Part x) { return vrndnq_f32(x); }
inline bool exceeds(Part a, Part b) { return vminvq_u32(vcleq_f32(a, b)) == 0; }  // anywhere
inline float reduce_add(Part x) { return vaddvq_f32(x); }

inline Part load_part(const float* from) { return vld1q_f32(from); }

inline Part load_part(const bf16* from) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(from), 16)); }

inline void store(float* to, Part x) { vst1q_f32(to, x); }

}  // namespace sarathi
