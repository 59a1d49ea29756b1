//! AVX2 and AVX-512.

use std::arch::x86_64::*;

use super::{Isa, Task};

/// # Safety
///
/// The processor has these instructions; further needs are the task's.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn run_avx2<T: Task>(task: T) {
    task.run::<Avx2>();
}

/// # Safety
///
/// The processor has these instructions; further needs are the task's.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl")]
pub(super) unsafe fn run_avx512<T: Task>(task: T) {
    task.run::<Avx512>();
}

#[derive(Clone, Copy)]
pub(crate) struct Avx2;

#[derive(Clone, Copy)]
pub(crate) struct Avx512;

#[inline(always)]
unsafe fn half(from: *const u8) -> f32 {
    _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(from.cast::<u16>().read_unaligned()))))
}

/// Two float16s in the lowest lanes. They are loaded together, straight into a vector register: what moves between
/// kinds of registers or lanes is what the kernels' speed depends on.
#[inline(always)]
unsafe fn two_halves(from: *const u8) -> __m128 {
    _mm_cvtph_ps(_mm_loadu_si32(from))
}

/// Eight rows of eight numbers become columns, see [`Isa::transpose`].
#[inline(always)]
unsafe fn transpose_8(from: *const f32, stride: usize, to: *mut f32, apart: usize) {
    // Rows i and i + 4 in one register, so that what follows stays within its halves.
    let two = |row: usize, at: usize| {
        let low = _mm256_castps128_ps256(_mm_loadu_ps(from.add(row * stride + at)));
        _mm256_insertf128_ps::<1>(low, _mm_loadu_ps(from.add((row + 4) * stride + at)))
    };
    for at in [0, 4] {
        let [a, b, c, d] = [two(0, at), two(1, at), two(2, at), two(3, at)];
        let (ab, ab_upper) = (_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
        let (cd, cd_upper) = (_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
        let to = to.add(at * apart);
        _mm256_storeu_ps(to, _mm256_shuffle_ps::<0b01_00_01_00>(ab, cd));
        _mm256_storeu_ps(to.add(apart), _mm256_shuffle_ps::<0b11_10_11_10>(ab, cd));
        _mm256_storeu_ps(to.add(2 * apart), _mm256_shuffle_ps::<0b01_00_01_00>(ab_upper, cd_upper));
        _mm256_storeu_ps(to.add(3 * apart), _mm256_shuffle_ps::<0b11_10_11_10>(ab_upper, cd_upper));
    }
}

impl Isa for Avx2 {
    type V = __m256;
    type Table = (__m256, __m256);
    const LANES: usize = 8;
    const TILE: usize = 3;

    #[inline(always)]
    unsafe fn zero() -> __m256 {
        _mm256_setzero_ps()
    }

    #[inline(always)]
    unsafe fn splat(value: f32) -> __m256 {
        _mm256_set1_ps(value)
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> __m256 {
        _mm256_loadu_ps(from)
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, value: __m256) {
        _mm256_storeu_ps(to, value);
    }

    #[inline(always)]
    unsafe fn add(a: __m256, b: __m256) -> __m256 {
        _mm256_add_ps(a, b)
    }

    #[inline(always)]
    unsafe fn sub(a: __m256, b: __m256) -> __m256 {
        _mm256_sub_ps(a, b)
    }

    #[inline(always)]
    unsafe fn mul(a: __m256, b: __m256) -> __m256 {
        _mm256_mul_ps(a, b)
    }

    #[inline(always)]
    unsafe fn div(a: __m256, b: __m256) -> __m256 {
        _mm256_div_ps(a, b)
    }

    #[inline(always)]
    unsafe fn max(a: __m256, b: __m256) -> __m256 {
        _mm256_max_ps(a, b)
    }

    #[inline(always)]
    unsafe fn min(a: __m256, b: __m256) -> __m256 {
        _mm256_min_ps(a, b)
    }

    #[inline(always)]
    unsafe fn fma(a: __m256, b: __m256, c: __m256) -> __m256 {
        _mm256_fmadd_ps(a, b, c)
    }

    #[inline(always)]
    unsafe fn round(a: __m256) -> __m256 {
        _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a)
    }

    #[inline(always)]
    unsafe fn scale(a: __m256, n: __m256) -> __m256 {
        let exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
        _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32::<23>(exponent)))
    }

    #[inline(always)]
    unsafe fn largest(a: __m256) -> f32 {
        let four = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
        let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)))
    }

    #[inline(always)]
    unsafe fn sums(a: [__m256; 4]) -> [f32; 4] {
        // Each adds neighbouring lanes, first of two registers, then of the two results.
        let four = _mm256_hadd_ps(_mm256_hadd_ps(a[0], a[1]), _mm256_hadd_ps(a[2], a[3]));
        std::mem::transmute(_mm_add_ps(_mm256_castps256_ps128(four), _mm256_extractf128_ps::<1>(four)))
    }

    #[inline(always)]
    unsafe fn transpose(from: *const f32, stride: usize, to: *mut f32, apart: usize) {
        transpose_8(from, stride, to, apart);
    }

    #[inline(always)]
    unsafe fn prefetch(at: *const u8) {
        _mm_prefetch::<_MM_HINT_T0>(at.cast());
    }

    #[inline(always)]
    unsafe fn half(from: *const u8) -> f32 {
        half(from)
    }

    #[inline(always)]
    unsafe fn pair(from: *const u8) -> (__m256, __m256) {
        // Loading spreads them for nothing, and then each stands in its own lanes' neighbours.
        let both = _mm256_cvtph_ps(_mm_castps_si128(_mm_broadcast_ss(&from.cast::<f32>().read_unaligned())));
        (_mm256_moveldup_ps(both), _mm256_movehdup_ps(both))
    }

    #[inline(always)]
    unsafe fn spread(from: *const u8) -> __m256 {
        _mm256_cvtph_ps(_mm_set1_epi16(from.cast::<i16>().read_unaligned()))
    }

    #[inline(always)]
    unsafe fn halves(from: *const u8) -> __m256 {
        _mm256_cvtph_ps(_mm_loadu_si128(from.cast()))
    }

    #[inline(always)]
    unsafe fn bfloats(from: *const u8) -> __m256 {
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()))))
    }

    #[inline(always)]
    unsafe fn bytes(from: *const u8) -> __m256 {
        _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(from.cast())))
    }

    #[inline(always)]
    unsafe fn table(d: __m256, m: __m256) -> (__m256, __m256) {
        (d, m)
    }

    #[inline(always)]
    unsafe fn nibbles((d, m): (__m256, __m256), from: *const u8, upper: bool) -> __m256 {
        _mm256_fmadd_ps(_mm256_cvtepi32_ps(nibbles_8(from, upper)), d, m)
    }

    #[inline(always)]
    unsafe fn topped(low: *const u8, upper: bool, top: *const u8, shift: u32, mask: u8) -> __m256 {
        let top = _mm256_srl_epi32(wide_8(top), _mm_cvtsi32_si128(shift as i32));
        let top = _mm256_slli_epi32::<4>(_mm256_and_si256(top, _mm256_set1_epi32(i32::from(mask))));
        _mm256_cvtepi32_ps(_mm256_or_si256(nibbles_8(low, upper), top))
    }
}

#[inline(always)]
unsafe fn wide_8(from: *const u8) -> __m256i {
    _mm256_cvtepu8_epi32(_mm_loadl_epi64(from.cast()))
}

#[inline(always)]
unsafe fn nibbles_8(from: *const u8, upper: bool) -> __m256i {
    let wide = wide_8(from);
    if upper { _mm256_srli_epi32::<4>(wide) } else { _mm256_and_si256(wide, _mm256_set1_epi32(15)) }
}

impl Isa for Avx512 {
    type V = __m512;
    type Table = __m512;
    const LANES: usize = 16;
    const TILE: usize = 6;

    #[inline(always)]
    unsafe fn zero() -> __m512 {
        _mm512_setzero_ps()
    }

    #[inline(always)]
    unsafe fn splat(value: f32) -> __m512 {
        _mm512_set1_ps(value)
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> __m512 {
        _mm512_loadu_ps(from)
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, value: __m512) {
        _mm512_storeu_ps(to, value);
    }

    #[inline(always)]
    unsafe fn add(a: __m512, b: __m512) -> __m512 {
        _mm512_add_ps(a, b)
    }

    #[inline(always)]
    unsafe fn sub(a: __m512, b: __m512) -> __m512 {
        _mm512_sub_ps(a, b)
    }

    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        _mm512_mul_ps(a, b)
    }

    #[inline(always)]
    unsafe fn div(a: __m512, b: __m512) -> __m512 {
        _mm512_div_ps(a, b)
    }

    #[inline(always)]
    unsafe fn max(a: __m512, b: __m512) -> __m512 {
        _mm512_max_ps(a, b)
    }

    #[inline(always)]
    unsafe fn min(a: __m512, b: __m512) -> __m512 {
        _mm512_min_ps(a, b)
    }

    #[inline(always)]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        _mm512_fmadd_ps(a, b, c)
    }

    #[inline(always)]
    unsafe fn round(a: __m512) -> __m512 {
        _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a)
    }

    #[inline(always)]
    unsafe fn scale(a: __m512, n: __m512) -> __m512 {
        _mm512_scalef_ps(a, n)
    }

    #[inline(always)]
    unsafe fn largest(a: __m512) -> f32 {
        _mm512_reduce_max_ps(a)
    }

    #[inline(always)]
    unsafe fn sums(a: [__m512; 4]) -> [f32; 4] {
        let ab = _mm512_add_ps(_mm512_unpacklo_ps(a[0], a[1]), _mm512_unpackhi_ps(a[0], a[1]));
        let cd = _mm512_add_ps(_mm512_unpacklo_ps(a[2], a[3]), _mm512_unpackhi_ps(a[2], a[3]));
        // Each quarter now holds two partial sums of a and b, or of c and d, side by side.
        let (ab, cd) = (_mm512_castps_pd(ab), _mm512_castps_pd(cd));
        let lower = _mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd));
        let upper = _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd));
        let quarters = _mm512_add_ps(lower, upper);
        let halves = _mm512_add_ps(quarters, _mm512_shuffle_f32x4::<0b01_00_11_10>(quarters, quarters));
        let half = _mm512_castps512_ps256(halves);
        std::mem::transmute(_mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps::<1>(half)))
    }

    #[inline(always)]
    fn lane(turn: usize) -> usize {
        // Of four, and of the four fours, the first meets the third.
        const MEETS: [usize; 4] = [0, 2, 1, 3];
        4 * MEETS[turn / 4] + MEETS[turn % 4]
    }

    #[inline(always)]
    unsafe fn transpose(from: *const f32, stride: usize, to: *mut f32, apart: usize) {
        for (i, j) in [(0, 0), (0, 8), (8, 0), (8, 8)] {
            transpose_8(from.add(i * stride + j), stride, to.add(j * apart + i), apart);
        }
    }

    #[inline(always)]
    unsafe fn prefetch(at: *const u8) {
        _mm_prefetch::<_MM_HINT_T0>(at.cast());
    }

    #[inline(always)]
    unsafe fn half(from: *const u8) -> f32 {
        half(from)
    }

    #[inline(always)]
    unsafe fn pair(from: *const u8) -> (__m512, __m512) {
        let two = _mm512_castps128_ps512(two_halves(from));
        (_mm512_broadcastss_ps(_mm512_castps512_ps128(two)), _mm512_permutexvar_ps(_mm512_set1_epi32(1), two))
    }

    #[inline(always)]
    unsafe fn spread(from: *const u8) -> __m512 {
        _mm512_cvtph_ps(_mm256_set1_epi16(from.cast::<i16>().read_unaligned()))
    }

    #[inline(always)]
    unsafe fn halves(from: *const u8) -> __m512 {
        _mm512_cvtph_ps(_mm256_loadu_si256(from.cast()))
    }

    #[inline(always)]
    unsafe fn bfloats(from: *const u8) -> __m512 {
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()))))
    }

    #[inline(always)]
    unsafe fn bytes(from: *const u8) -> __m512 {
        _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.cast())))
    }

    #[inline(always)]
    unsafe fn table(d: __m512, m: __m512) -> __m512 {
        let q = _mm512_setr_ps(0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0);
        _mm512_fmadd_ps(q, d, m)
    }

    #[inline(always)]
    unsafe fn nibbles(table: __m512, from: *const u8, upper: bool) -> __m512 {
        let wide = wide_16(from);
        // The instruction looks at the lowest four bits of an index only.
        let index = if upper { _mm512_srli_epi32::<4>(wide) } else { wide };
        _mm512_permutexvar_ps(index, table)
    }

    #[inline(always)]
    unsafe fn topped(low: *const u8, upper: bool, top: *const u8, shift: u32, mask: u8) -> __m512 {
        let low = wide_16(low);
        let low = if upper { _mm512_srli_epi32::<4>(low) } else { _mm512_and_si512(low, _mm512_set1_epi32(15)) };
        let top = _mm512_srl_epi32(wide_16(top), _mm_cvtsi32_si128(shift as i32));
        let top = _mm512_slli_epi32::<4>(_mm512_and_si512(top, _mm512_set1_epi32(i32::from(mask))));
        _mm512_cvtepi32_ps(_mm512_or_si512(low, top))
    }
}

#[inline(always)]
unsafe fn wide_16(from: *const u8) -> __m512i {
    _mm512_cvtepu8_epi32(_mm_loadu_si128(from.cast()))
}
